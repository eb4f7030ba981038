"""The search for a step: that it ends, and hits the bits, on vectors of every kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from parallel_sgd.compression import find_step, message_room, sample_of_sums, step_search
from parallel_sgd.kernels import cpu
from parallel_sgd.kernels.entropy_reference import BLOCK, SMALLEST_STEP

F32 = np.float32
RANDOM = np.random.default_rng(3)

VECTORS = {
    "normal": RANDOM.standard_normal(40 * BLOCK).astype(F32),
    "layers": (
        RANDOM.standard_normal(40 * BLOCK) * np.repeat(np.exp(RANDOM.standard_normal(40)), BLOCK)
    ).astype(F32),
    "heavy tails": RANDOM.standard_cauchy(40 * BLOCK).astype(F32),
    "ones": np.ones(40 * BLOCK, F32),
    "mostly zeros": np.where(RANDOM.random(40 * BLOCK) < 0.97, 0, 1).astype(F32),
    "short": RANDOM.standard_normal(1000).astype(F32),
}


def bits_of(v, step):
    payload = np.zeros(message_room(v.size), np.uint8)
    return 8 * cpu.encode_entropy(None, v.copy(), payload, step) / v.size


@pytest.fixture
def encodes(monkeypatch):
    """The steps that are tried, each with the number of values that it is tried on."""
    tried = []
    inner = step_search._Search._bits_of

    def counted(self, v, step):
        tried.append((v.size, step))
        return inner(self, v, step)

    monkeypatch.setattr(step_search._Search, "_bits_of", counted)
    return tried


@pytest.mark.parametrize("bits", [0.05, 0.25, 1, 4.5])
@pytest.mark.parametrize("name", ["normal", "layers", "heavy tails", "short"])
def test_the_bits_are_hit_in_few_tries(encodes, name, bits):
    v = VECTORS[name]
    step = find_step(v, bits, v.size)
    wanted = max(bits, step_search.LEAST_BITS / v.size)
    assert step.bits == bits_of(v, step.size) == pytest.approx(wanted, rel=0.04)
    assert len(encodes) <= 12


@pytest.mark.parametrize("bits", [0.05, 1, 8])
@pytest.mark.parametrize("name", ["ones", "mostly zeros"])
def test_where_no_step_hits_them_none_is_tried_twice(encodes, name, bits):
    v = VECTORS[name]
    step = find_step(v, bits, v.size)
    assert step.bits == bits_of(v, step.size)
    assert len({*encodes}) == len(encodes) <= 20


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 2.0**-128, 2.0**-127, 2.0**-120, 1e30, 3e38])
def test_values_of_every_magnitude(largest):
    for n in (100, 40 * BLOCK):
        v = (VECTORS["normal"][:n] / 5 * largest).astype(F32)
        step = find_step(v, 1, v.size)
        assert SMALLEST_STEP <= step.size < np.inf
        assert np.isfinite(bits_of(v, step.size))


def test_a_sample_of_few_values_is_all_of_them():
    for n in (1, 3000, 5 * BLOCK + 7):
        a, b = (RANDOM.standard_normal(n).astype(F32) for _ in range(2))
        for all_of_them in (True, False):
            for pairs, v in (([(a, b)], a + b), ([(None, a), (None, b)], np.concatenate([a, b]))):
                assert np.array_equal(sample_of_sums(pairs, of_all=all_of_them), v)


def test_a_sample_of_all_has_the_end_of_a_long_vector():
    v = np.zeros(300 * BLOCK + 5, F32)
    v[-1] = 1
    assert not sample_of_sums([(None, v)]).any()
    assert sample_of_sums([(None, v)], of_all=True)[-1] == 1


def test_a_step_does_not_depend_on_earlier_searches(monkeypatch):
    """Also in another thread at the same time, and with more values than memory is kept for."""
    alone = {}
    for name, v in VECTORS.items():
        monkeypatch.setattr(step_search, "_scratch", step_search._Scratch())
        alone[name] = find_step(v, 1, v.size)

    def again(_: int) -> list[bool]:
        return [find_step(v, 1, v.size) == alone[name] for name, v in VECTORS.items() for _ in "ab"]

    for kept in (step_search.MOST_KEPT, 2000):
        monkeypatch.setattr(step_search, "MOST_KEPT", kept)
        with ThreadPoolExecutor(2) as pool:
            assert all(all(equal) for equal in pool.map(again, range(20)))
