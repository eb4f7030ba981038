"""The exchange with an entropy code: its equations, its bytes, and steps that hit the bits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cases import BLOCK_SIZE, LAYOUTS, case
from invariants import conserves_gradients, same_on_all_ranks

from parallel_sgd import Communicator, Parameters
from parallel_sgd.compression import (
    Codec,
    EntropyCoded,
    Mixed,
    codec_for,
    find_step,
    sample_of_sums,
)
from parallel_sgd.exchange import Exchange, Topology, cut_buckets
from parallel_sgd.patterns import Patterns

pytestmark = pytest.mark.messages

Array = np.ndarray

LONG = {"a": (300, 400), "b": (400,), "c": (400, 100), "d": (100,), "e": (60, 1000)}

CODECS: dict[str, Codec] = {
    "1 bit": EntropyCoded(bits=1, block_size=BLOCK_SIZE),
    "a tenth": EntropyCoded(bits=0.1, block_size=BLOCK_SIZE),
    "5 bits": EntropyCoded(bits=5, block_size=BLOCK_SIZE),
    "mixed": Mixed(
        others=codec_for(1, block_size=BLOCK_SIZE),
        own=Patterns(
            {
                pattern: codec_for(bits, block_size=BLOCK_SIZE)
                for pattern, bits in {"b": 32, "<4": 16, "[ce]": 8, "p1*": 0.3, "d": 4}.items()
            }
        ),
    ),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


def long_gradient(rank: int, step: int, n: int) -> Array:
    """Values of many sizes, as the layers of a model have them; other ones on every rank."""
    random = np.random.default_rng([3, rank, step])
    scale = np.repeat(np.exp(2 * np.random.default_rng(5).standard_normal(n // 300 + 1)), 300)[:n]
    return (random.standard_normal(n) * scale * (1 + rank)).astype(np.float32)


def sums_of(
    comm: Communicator, layout: dict[str, tuple[int, ...]], codec: Codec, steps: int, **options
) -> tuple[Array, object, Exchange]:
    parameters = Parameters({name: np.zeros(s, np.float32) for name, s in layout.items()})
    exchange = Exchange(parameters, comm, codec, **options)
    residuals = exchange.residuals(parameters)
    sums = []
    for step in range(steps):
        vector = long_gradient(comm.rank, step, parameters.flat.size)
        exchange.sum(vector, residuals)
        sums.append(vector)
    return np.array(sums), residuals, exchange


def quantized(v: Array, step: float) -> Array:
    k = np.clip(np.rint(v * (np.float32(1) / np.float32(step))), -32767, 32767)
    return k.astype(np.float32) * np.float32(step)


@every_codec
@pytest.mark.parametrize("transport", ["collective", "pipelined"])
def test_nothing_is_lost(comm, codec, transport):
    for layout in LAYOUTS:
        with case(layout):
            conserves_gradients(comm, codec, layout, transport=transport)


@every_codec
def test_nothing_is_lost_between_hosts(comm, codec):
    """Where a rank adds up what the ranks of its host have before it finds a step."""
    for places in ("aabb", "abab", "aaaa"):
        options = {"transport": "pipelined", "topology": Topology.over(places[: comm.size])}
        with case(places):
            conserves_gradients(comm, codec, "long", steps=4, **options)


def test_the_two_stages(comm):
    """The sums are those of the equations, calculated here for all ranks without an exchange."""
    codec, n = EntropyCoded(bits=1, block_size=1024), sum(np.prod(s) for s in LONG.values())
    sums, residuals, _ = sums_of(comm, LONG, codec, 4)
    parameters = Parameters({name: np.zeros(s, np.float32) for name, s in LONG.items()})
    starts = codec.blocks(parameters).starts
    owners = np.ceil(np.arange(1, comm.size) * n / comm.size)
    cuts = starts[[0, *np.searchsorted(starts, owners), len(starts) - 1]].tolist()
    worker, owner = np.zeros((comm.size, n), np.float32), np.zeros(n, np.float32)
    for step in range(4):
        for k in range(comm.size):
            g = long_gradient(k, step, n)
            size = find_step(sample_of_sums([(g, worker[k])]), 1, n).size
            v = g + worker[k]
            q = quantized(v, size)
            worker[k] = v - q
            owner += q
        expected = np.empty(n, np.float32)
        for begin, end in pairwise(cuts):
            stripe = owner[begin:end]
            size = find_step(sample_of_sums([(None, stripe)]), 1, end - begin).size
            expected[begin:end] = quantized(stripe, size)
            stripe -= expected[begin:end]
        assert np.array_equal(sums[step], expected)
    assert np.array_equal(residuals.worker_error, worker[comm.rank])
    own = slice(cuts[comm.rank], cuts[comm.rank + 1])
    assert np.array_equal(residuals.owner_error["0"], owner[own])


@every_codec
def test_transports_have_the_same_bits(comm, codec):
    parameters = Parameters({name: np.zeros(s, np.float32) for name, s in LONG.items()})
    starts = codec.blocks(parameters).starts
    buckets = cut_buckets(parameters, BLOCK_SIZE, 30_000, starts)
    assert len(buckets) > 2
    one, lost, by = sums_of(comm, LONG, codec, 3, buckets=buckets)
    other, lost_too, by_pieces = sums_of(
        comm, LONG, codec, 3, buckets=buckets, transport="pipelined"
    )
    same_on_all_ranks(comm, one)
    assert np.array_equal(one, other)
    assert np.array_equal(lost.worker_error, lost_too.worker_error)
    lengths = 3 * len(buckets) * 2 * 8 * (comm.size - 1)  # which come before messages of any length
    assert by.bytes_sent == by_pieces.bytes_sent + lengths


@pytest.mark.parametrize("bits", [0.05, 0.25, 1, 4.5])
def test_the_bits_are_hit(comm, bits):
    """In both directions: within 10 % on average, and 50 % in each step, from the first one on."""
    n = sum(np.prod(s) for s in LONG.values())
    parameters = Parameters({name: np.zeros(s, np.float32) for name, s in LONG.items()})
    exchange = Exchange(parameters, comm, EntropyCoded(bits=bits), transport="pipelined")
    residuals = exchange.residuals(parameters)
    expected = 2 * (comm.size - 1) / comm.size * n * bits / 8
    per_step, before = [], 0
    for step in range(30):
        vector = long_gradient(comm.rank, step, n)
        vector *= np.float32(1 if step < 10 else 10)
        if step == 15:
            vector[:] = 0
        if step == 20:
            vector[np.random.default_rng(comm.rank).random(n) < 0.01] *= 1000
        exchange.sum(vector, residuals)
        sent = sum(comm.allgather_object(exchange.bytes_sent)) / comm.size
        per_step.append((sent - before) / expected if comm.size > 1 else 1.0)
        before = sent
    extra = 1 + 2 * (comm.size - 1) * 64 / expected if comm.size > 1 else 1.0
    for first in range(0, 30, 10):
        assert 0.9 < np.mean(per_step[first : first + 10]) < 1.1 * extra
    assert max(per_step) < 1.5 * extra
    # With many bits, values a million times as large as others would be clipped first.
    assert min(per_step) > 0.5 or bits > 2


@pytest.mark.parametrize("kind", ["constant", "one layer of two", "few rows"])
def test_what_is_unevenly_spread_arrives_too(comm, kind):
    """Values that are alike, layers of unlike size, and rows that a sample may miss."""
    n, bits, steps = 200 * 2048, 0.2, 30
    if kind == "constant":  # all of it is sent, now and then
        n, bits, steps = 70 * 2048, 0.5, 90
    parameters = Parameters({"x": np.zeros(n, np.float32)})
    exchange = Exchange(parameters, comm, EntropyCoded(bits=bits))
    residuals = exchange.residuals(parameters)
    arrived = np.zeros(n)
    alike = np.ones(n, np.float32)  # on all ranks, in all steps
    if kind == "few rows":
        alike[: 173 * 2048] = alike[174 * 2048 :] = 0
    for step in range(steps):
        vector = alike.copy()
        if kind == "one layer of two":
            vector = np.random.default_rng([step, comm.rank]).standard_normal(n, np.float32)
            vector[: n // 2] *= 0.1
        exchange.sum(vector, residuals)
        arrived += vector
    if kind != "one layer of two":
        given = alike * float(steps * comm.size)
        assert np.abs(arrived - given).mean() < 0.5 * np.abs(given).mean() + 0.5
    elif comm.size > 1:
        sent = sum(comm.allgather_object(exchange.bytes_sent)) / steps
        # The owner of small values alone may have nothing to send.
        assert 0.7 < sent / (2 * (comm.size - 1) * n * bits / 8) < 1.1
