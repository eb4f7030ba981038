"""A codec from outside is one class: registered, it is exchanged, measured and chosen as others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
from cases import BLOCK_SIZE, gradient_of, zeros
from invariants import (
    conserves_gradients,
    equals_two_stages_in_one_place,
    keeps_residuals_when_bits_change,
    same_on_all_ranks,
)

from parallel_sgd import SGD, DataParallelSGD, Learner, UserError
from parallel_sgd.compression import (
    Codec,
    EntropyCoded,
    OneBit,
    codec_for,
    codec_from_dict,
    register,
    registered_bits,
    unregister,
)
from parallel_sgd.costs import KernelSpeeds, Link, best_bits, bytes_sent, measure_kernel_speeds
from parallel_sgd.kernels import Blocks

BITS, FRACTION = 3, 1.6


@dataclass(frozen=True, kw_only=True)
class Ternary(Codec):
    """-1, 0 or 1 times the mean magnitude of a block: a float32, and four values in a byte."""

    bits: float  # type: ignore[misc]

    def blocks(self, parameters):
        starts = parameters.block_starts(self.block_size)
        lengths = 4 + -(-np.diff(starts) // 4)
        return Blocks(starts, np.concatenate([[0], np.cumsum(lengths)]))

    def encode(self, blocks, vector, residual, payload):
        for values, place in within(blocks):
            v = vector[values] + residual[values]
            scale = np.abs(v).mean(dtype=np.float32)
            signs = np.sign(v) * (np.abs(v) > scale / 2)
            residual[values] = v - scale * signs
            codes = np.resize((signs + 1).astype(np.uint8), (-(-v.size // 4), 4))
            message = payload[place]
            message[:4] = np.frombuffer(scale.tobytes(), np.uint8)
            message[4:] = codes @ np.array([1, 4, 16, 64], np.uint8)

    def decode(self, blocks, payload, out, add):
        for values, place in within(blocks):
            message, total = payload[place], out[values]
            codes = (message[4:, np.newaxis] >> np.array([0, 2, 4, 6], np.uint8)) & 3
            signs = codes.ravel()[: total.size].astype(np.float32) - 1
            decoded = np.frombuffer(message[:4].tobytes(), np.float32) * signs
            total[...] = total + decoded if add else decoded


def within(blocks: Blocks) -> Iterator[tuple[slice, slice]]:
    """Where each block lies in arrays that hold just these."""
    places = zip(blocks.starts - blocks.starts[0], blocks.offsets - blocks.offsets[0], strict=True)
    for (begin, first), (end, last) in pairwise(places):
        yield slice(begin, end), slice(first, last)


@pytest.fixture(autouse=True)
def registered():
    register(BITS, FRACTION)(Ternary)
    yield
    unregister(Ternary)
    assert {BITS, FRACTION}.isdisjoint(registered_bits())


every_transport = pytest.mark.parametrize("transport", ["collective", "pipelined"])


@every_transport
@pytest.mark.parametrize("bits", [BITS, FRACTION])
@pytest.mark.parametrize("layout", ["matrix and bias", "large and small"])
def test_nothing_is_lost(comm, transport, bits, layout):
    """Sum of results + residuals == sum of inputs."""
    codec = codec_for(bits, block_size=BLOCK_SIZE)
    conserves_gradients(comm, codec, layout, transport=transport)
    equals_two_stages_in_one_place(comm, codec, layout, transport=transport)


@every_transport
@pytest.mark.parametrize("bits", [BITS, FRACTION])
def test_algorithms_take_it(comm, transport, bits):
    algorithm = DataParallelSGD(gradient_bits=bits, transport=transport, block_size=BLOCK_SIZE)
    learner = Learner(zeros("matrix and bias"), SGD(lr=0.1), algorithm, comm)
    learner.gradient.flat[:] = gradient_of(comm.rank, 0, learner.gradient.flat.size)
    learner.step(samples=1)
    exchange = learner.state.exchange
    (codec,) = exchange.current.codecs
    assert codec == Ternary(bits=bits, block_size=BLOCK_SIZE)
    assert exchange.residuals.worker_error.any()
    same_on_all_ranks(comm, learner.parameters.flat)
    keeps_residuals_when_bits_change(comm, {0: bits, 20: 32}, transport=transport)
    DataParallelSGD(gradient_bits=bits, error_feedback=False)


def test_options_and_files():
    codec = codec_for(FRACTION, block_size=70, threshold="mean")  # which it does not have
    assert codec == Ternary(bits=FRACTION, block_size=70)
    assert codec_from_dict(json.loads(json.dumps(codec.to_dict()))) == codec
    assert registered_bits() == (0.1, 0.25, 0.5, 1, FRACTION, BITS, 4, 8, 16, 32)
    with pytest.raises(UserError, match=r"gradient_bits=9 must be a number from 0\.05 to 8, 16 or"):
        codec_for(9)
    assert codec_for(BITS, code="entropy") == EntropyCoded(bits=BITS)


def test_bits_are_of_one_codec():
    class Another(OneBit):
        bits: ClassVar[float] = BITS

    with pytest.raises(UserError, match="Another: Ternary is already registered for 3 bits"):
        register(6, BITS)(Another)
    assert 6 not in registered_bits()


def test_it_is_measured_and_chosen():
    speeds = measure_kernel_speeds(values=1 << 16)
    assert {BITS, FRACTION} < speeds.encode.keys()
    assert bytes_sent(1024, BITS, 2) == 4 + 256
    even = dict.fromkeys(speeds.encode, 1e9)
    slow, free = Link(0.0, 1e5), KernelSpeeds(even, even, even)
    assert best_bits(10**6, 4, slow, free) == 1
    del even[1]
    assert best_bits(10**6, 4, slow, free) == BITS  # as few bytes as FRACTION's
