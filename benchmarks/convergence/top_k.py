"""The largest 16 of every 1024 values: the usual sparse codec, in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from parallel_sgd import Parameters
from parallel_sgd.compression import Codec, register, unregister
from parallel_sgd.kernels import Blocks

Array = Any

ONE_OF = 64  #: values, one is sent; of a block that is no multiple, one more
BYTES = 2 + 4  #: of a value that is sent: its place and itself


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Send the values of largest magnitude of each block unchanged: 48 bits for each 64 values.

    All more values wait in the residual. Source: Aji & Heafield, EMNLP 2017; Lin et al., "Deep
    Gradient Compression", ICLR 2018, without warm-up and momentum correction.
    """

    bits: ClassVar[float] = 0.75

    def blocks(self, parameters: Parameters) -> Blocks:
        starts = parameters.block_starts(self.block_size)
        kept = -(-np.diff(starts) // ONE_OF)
        return Blocks(starts, np.concatenate([[0], np.cumsum(BYTES * kept)]))

    def encode(self, blocks: Blocks, vector: Array, residual: Array, payload: Array) -> None:
        np.add(vector, residual, out=residual)
        for v, message in _alike(blocks, residual, payload):
            kept = message.shape[1] // BYTES
            places = np.argpartition(np.abs(v), -kept, axis=1)[:, -kept:].astype(np.uint16)
            chosen = np.arange(len(v))[:, np.newaxis], places
            message[:, : 2 * kept] = places.view(np.uint8)
            message[:, 2 * kept :] = v[chosen].view(np.uint8)
            v[chosen] = 0

    def decode(self, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
        if not add:
            out.fill(0)
        for x, message in _alike(blocks, out, payload):
            kept = message.shape[1] // BYTES
            places = np.ascontiguousarray(message[:, : 2 * kept]).view(np.uint16)
            values = np.ascontiguousarray(message[:, 2 * kept :]).view(np.float32)
            x[np.arange(len(x))[:, np.newaxis], places] += values


def _alike(blocks: Blocks, values: Array, payload: Array) -> Iterator[tuple[Array, Array]]:
    """Yield runs of blocks of equal length: their values [blocks, length], and payload."""
    value = byte = 0
    for length, several in groupby(np.diff(blocks.starts).tolist()):
        count, size = len(list(several)), BYTES * -(-length // ONE_OF)
        end, last = value + count * length, byte + count * size
        yield values[value:end].reshape(count, length), payload[byte:last].reshape(count, size)
        value, byte = end, last


@contextmanager
def registered() -> Iterator[None]:
    """Make the codec known for a `with` block."""
    register(TopK.bits)(TopK)
    try:
        yield
    finally:
        unregister(TopK)
