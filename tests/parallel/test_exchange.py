"""Both exchanges: the right sums, the same bits everywhere, nothing lost, and few bytes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cases import CODECS, LAYOUTS, case, gradient_of, zeros
from invariants import (
    conserves_gradients,
    equals_two_stages_in_one_place,
    sums_in_rank_order,
)

from parallel_sgd import Parameters, UserError
from parallel_sgd.compression import Mixed, OneBit, codec_for, registered_bits
from parallel_sgd.exchange import Exchange
from parallel_sgd.patterns import Patterns

pytestmark = pytest.mark.messages

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_full_precision_sums_in_rank_order(comm, dtype):
    for layout in LAYOUTS:
        with case(layout):
            sums_in_rank_order(comm, layout, dtype)


@pytest.fixture
def summed_at_a_time(monkeypatch):
    """Sets how many values are summed at a time."""
    return partial(monkeypatch.setattr, "parallel_sgd.exchange.reduction.IN_CACHE")


def test_full_precision_sums_piece_by_piece(on_ranks, summed_at_a_time):
    summed_at_a_time(1000)
    on_ranks(lambda comm: sums_in_rank_order(comm, "long", np.float64))


@every_codec
def test_nothing_is_lost(comm, codec):
    for layout in LAYOUTS:
        with case(layout):
            conserves_gradients(comm, codec, layout)


@pytest.mark.parametrize("transport", ["collective", "pipelined"])
@pytest.mark.parametrize("decay", [0.0, 0.95])
@pytest.mark.parametrize("codec", [codec_for(1), codec_for(4)], ids=["1 bit", "4 bits"])
def test_what_a_decay_forgets_is_known(comm, codec, decay, transport):
    """It is the same part of both residuals before every message."""
    options = {"residual_decay": decay, "transport": transport}
    conserves_gradients(comm, codec, "matrix and bias", **options)


@every_codec
def test_the_two_stages(comm, codec):
    for layout in LAYOUTS:
        with case(layout):
            equals_two_stages_in_one_place(comm, codec, layout)


def test_stripes_of_many_blocks(on_ranks, summed_at_a_time):
    """An owner adds a few blocks at a time, and the last of them may be fewer."""
    summed_at_a_time(300)
    for codec in (OneBit(block_size=100), codec_for(4, block_size=257)):
        on_ranks(lambda comm, codec=codec: equals_two_stages_in_one_place(comm, codec, "long"))


def test_float16_keeps_what_is_too_large_for_it(comm):
    """Beyond ±65504 the largest float16 is sent, and the rest follows in later steps."""
    parameters = zeros("one block")
    exchange = Exchange(parameters, comm, codec_for(16))
    residuals = exchange.residuals(parameters)
    results = np.zeros(60)
    for step in range(40):
        vector = np.full(60, 2e5 if step == 0 else 0, np.float32)
        exchange.sum(vector, residuals)
        results += vector
    assert np.abs(results - comm.size * 2e5).max() < 1


class Counting:
    """Passes on to a communicator, and counts the bytes that really go to other ranks.

    It has the collectives of an exchange and nothing else, so no other is used.
    """

    def __init__(self, inner):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.trace, self.hosts = inner.trace, inner.hosts
        self.bytes, self.calls = 0, 0

    def allgather(self, send, receive, counts):
        assert send.size == counts[self.rank]
        self._count((self.size - 1) * send.nbytes)
        self.inner.allgather(send, receive, counts)

    def alltoall(self, send, send_counts, receive, receive_counts, **options):
        assert send.size == sum(send_counts)
        self._count(send.nbytes - send_counts[self.rank] * send.itemsize)
        self.inner.alltoall(send, send_counts, receive, receive_counts)

    def _count(self, nbytes):
        self.bytes += nbytes
        self.calls += 1


LARGE = {"W1": (300, 400), "b1": (400,), "W2": (400, 100), "b2": (100,)}  # 160,500 values


@pytest.mark.parametrize("bits", [*registered_bits(), "sign"])
@pytest.mark.parametrize("block_size", [256, 1024])
def test_bytes_sent(comm, bits, block_size):
    """2 (K-1)/K n (b/8 + levels/block) bytes a rank and sum, in two collectives; alone none."""
    parameters = Parameters({k: np.zeros(s, np.float32) for k, s in LARGE.items()})
    counting, n = Counting(comm), parameters.flat.size
    code, bits = ("sign", 1) if bits == "sign" else ("auto", bits)
    if bits == 32:
        exchange, residuals = Exchange(parameters, counting), None
    else:
        codec = codec_for(bits, code=code, block_size=block_size)
        exchange = Exchange(parameters, counting, codec)
        residuals = exchange.residuals(parameters)
    for step in range(2):
        exchange.sum(gradient_of(comm.rank, step, n), residuals)
    assert exchange.bytes_sent == counting.bytes
    lengths = code == "auto" and bits in (0.1, 0.25, 0.5, 1, 2)  # are sent before the messages
    assert counting.calls == (4 * (1 + lengths) if comm.size > 1 else 0)
    levels = 8 if code == "sign" else 4 if bits in (4, 8) else 0
    formula = 2 * (comm.size - 1) / comm.size * n * (bits / 8 + levels / block_size)
    formula += lengths * 2 * (comm.size - 1) * 8
    # In two steps of one rank, where sums have few different values, so that lengths jump;
    # `test_entropy_code` has more.
    within = 0.25 if lengths else 0.05
    assert (1 - within) * formula <= exchange.bytes_sent / 2 <= (1 + within) * formula


@every_codec
def test_small_vectors_are_not_inflated(comm, codec):
    """Every rank's payload, going and coming, is at most as large as its float32 values."""
    for layout in LAYOUTS:
        parameters = zeros(layout)
        counting, n = Counting(comm), parameters.flat.size
        exchange = Exchange(parameters, counting, codec)
        exchange.sum(gradient_of(comm.rank, 0, n), exchange.residuals(parameters))
        with case(layout):
            assert exchange.bytes_sent == counting.bytes
            sent = comm.allgather_object(exchange.bytes_sent)
            assert sum(sent) <= 2 * (comm.size - 1) * 4 * n


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_short_vector_takes_one_collective(comm, dtype):
    parameters = zeros("large and small", dtype)
    counting = Counting(comm)
    exchange = Exchange(parameters, counting)
    exchange.sum(parameters.flat)
    assert counting.calls == (1 if comm.size > 1 else 0)
    assert exchange.bytes_sent == counting.bytes == (comm.size - 1) * parameters.flat.nbytes


FEW_BITS = [
    *((codec_for(bits), bits) for bits in registered_bits()[:-1]),
    (CODECS["mixed"], 1),
    (Mixed(others=codec_for(32), own=Patterns({"w": codec_for(8)})), 8),
]


@pytest.mark.parametrize(("codec", "bits"), FEW_BITS, ids=str)
def test_few_bits_are_for_float32(comm, codec, bits):
    with pytest.raises(
        UserError, match=rf"^gradient_bits={bits} needs float32 parameters.* float64; use 32"
    ):
        Exchange(zeros("one block", np.float64), comm, codec)
