"""What happens to ids before rows are found, what rows begin with, and a table's options."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_model import LAST, POOLS, mix, unmix

from parallel_sgd import MomentumSGD, UserError
from parallel_sgd.embedding import Embedding, RowTable, server_of
from parallel_sgd.kernels import row_kernels

kernels = row_kernels()


def test_initial_values_are_the_same_everywhere():
    """Written down, so that every platform and every version agrees."""
    words = {
        (0, 0): [3147721812, 985936025, 1003414602],
        (0, 1): [3147015411, 1008770267, 1007157300],
        (1, 1): [3130907044, 1008642812, 3155967512],
        (7, LAST): [3131538995, 3120898560, 3155070783],
        (LAST, 10**11): [3137315666, 1007849793, 984748964],
    }
    for (seed, number), expected in words.items():
        out = np.empty((1, 3), np.float32)
        RowTable(Embedding(name="t", width=3, seed=seed)).pull(np.array([number]), out)
        assert out.view(np.uint32).tolist() == [expected]
    assert mix(0) == 0xE220A8397B1DCDAF  # SplitMix64's first number from 0
    assert unmix(mix(10**11)) == 10**11


@pytest.mark.parametrize("stride", [1, 2**32, 10**11 // 20000])
def test_initial_values_are_uniform_and_independent(stride):
    def drawn(seed):
        out = np.empty((20_000, 8), np.float32)
        options = Embedding(name="t", width=8, seed=seed, initial_scale=0.5)
        RowTable(options).pull(np.arange(20_000) * stride, out)
        return out.astype(float)

    x = drawn(0)
    assert -0.5 < x.min() < -0.4999 and 0.4999 < x.max() < 0.5
    assert abs(x.mean()) < 0.003 and x.var() == pytest.approx(0.25 / 3, rel=0.01)
    columns = np.concatenate([x, np.roll(x, 1, axis=0), drawn(1)], axis=1)
    correlation = np.corrcoef(columns.T) - np.eye(24)
    assert abs(correlation).max() < 0.04
    counts = np.histogram(x, 64, (-0.5, 0.5))[0]
    assert ((counts - 2500) ** 2 / 2500).sum() < 120  # chi squared of 63 degrees


def test_a_scale_of_zero_begins_with_zeros():
    out = np.ones((3, 2), np.float32)
    RowTable(Embedding(name="t", width=2, initial_scale=0)).pull(np.arange(3), out)
    assert not out.any()


def test_servers_get_equal_shares_that_say_nothing_of_the_slots():
    for ids in (np.arange(60_000), np.arange(60_000) << 40, np.arange(60_000) * 10**11):
        for servers in (1, 2, 3, 8):
            shares = np.bincount(server_of(ids, servers), minlength=servers)
            assert abs(shares - 60_000 / servers).max() < 1000
    ids = ids[server_of(ids, 8) == 3]
    upper = np.array([mix(i) >> 61 for i in ids.tolist()])
    assert np.bincount(upper, minlength=8).min() > 0.8 * len(ids) / 8
    few = np.array([0, 1, 2, 3, 10**11, 2**40, LAST])
    assert server_of(few, 7).tolist() == [0, 2, 5, 1, 4, 2, 4]


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(list(POOLS.values())), st.lists(st.integers(0, 39)), st.integers(1, 5))
def test_ids_are_made_unique_summed_and_dealt(pool, numbers, servers):
    ids = np.array([pool[i] for i in numbers], np.int64)
    distinct, inverse = kernels.unique(ids)
    assert distinct.tolist() == list(dict.fromkeys(ids.tolist()))
    assert inverse.dtype == np.int32 and np.array_equal(distinct[inverse], ids)
    random = np.random.default_rng(len(ids))
    gradient = random.standard_normal((len(ids), 3)).astype(np.float32)
    out, expected = np.full((2, len(distinct), 3), np.nan, np.float32)
    expected[:] = 0
    for place, row in zip(inverse, gradient, strict=True):
        expected[place] += row
    kernels.sum_rows(inverse, gradient, out)
    assert out.tobytes() == expected.tobytes()
    kernels.take_rows(out, inverse, gradient)
    assert np.array_equal(gradient, out[inverse])
    order, starts = kernels.partition(distinct, servers)
    of = server_of(distinct, servers)
    assert np.array_equal(order, np.argsort(of, kind="stable"))
    assert np.array_equal(np.diff(starts), np.bincount(of, minlength=servers))


def test_many_ids_are_made_unique_whatever_their_shape():
    ids = np.random.default_rng(0).integers(0, 3000, (100, 26)) << 33
    distinct, inverse = kernels.unique(ids)
    assert len(distinct) == len(np.unique(ids))
    assert np.array_equal(distinct[inverse].reshape(ids.shape), ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name='' must be a text that is not empty"),
        ({"name": 3}, "name=3 must be a text"),
        ({"width": 0}, "width=0 must be a whole number"),
        ({"width": 1.0}, "width=1.0 must be a whole number"),
        ({"optimizer": MomentumSGD(lr=1)}, "optimizer=MomentumSGD of embedding 't' must be"),
        ({"optimizer": "sgd"}, "optimizer='sgd' of embedding 't' must be an SGD"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"initial_scale": -0.1}, "initial_scale=-0.1 must be a finite number"),
        ({"entry_count": 0}, "entry_count=0 must be a whole number"),
        ({"evict_after": 0}, "evict_after=0 must be a whole number"),
    ],
)
def test_options_that_are_not_possible(options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Embedding(**{"name": "t", "width": 2, **options})


def test_options_are_plain_values():
    assert repr(Embedding(name="t", width=np.int64(2), seed=np.uint8(1), initial_scale=1)) == (
        "Embedding(name='t', width=2, optimizer=Adagrad(lr=0.05, lr_per_sample=None, "
        "epsilon=1e-10, initial_accumulator=0.0), seed=1, initial_scale=1.0, entry_count=1, "
        "evict_after=None)"
    )
