"""The data that every body of the kernels is compared with the reference on, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd.kernels import Blocks, IndexArray, cut, payload_offsets

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """One vector in blocks. Copy the arrays before a kernel writes into them.

    Args:
        starts: int64 [m + 1], the blocks; they need not begin at 0.
        gradient, residual: float32 [starts[-1] - starts[0]], finite, so that no sum of v overflows.
        first_byte: where the first block's payload begins.
    """

    name: str
    starts: IndexArray
    gradient: Floats
    residual: Floats
    first_byte: int = 0

    def blocks(self, bits: int) -> Blocks:
        """The blocks with their places in a payload of 1, 4 or 8 bits."""
        return Blocks(self.starts, self.first_byte + payload_offsets(self.starts, bits))

    def __str__(self) -> str:
        return self.name


def _case(name: str, starts: IndexArray, v: Any, first_byte: int = 0) -> Case:
    """A case whose sum v = g + r is near the given one: a third of it is residual."""
    v = np.asarray(v, np.float32)
    residual = (v / 3).astype(np.float32)
    return Case(name, starts, v - residual, residual, first_byte)


def _noise(n: int, seed: int = 0) -> Floats:
    """Normal values whose scale changes every 50 values, over twelve orders of magnitude."""
    random = np.random.default_rng([n, seed])
    scale = np.repeat(10 ** random.uniform(-6, 6, n // 50 + 1), 50)[:n]
    return (random.standard_normal(n) * scale).astype(np.float32)


def _block_sizes() -> Iterator[Case]:
    for block_size in (1, 3, 7, 32, 33, 100, 256, 1000, 1024, 1500, 4096):
        # short tails of a large parameter, small neighbours in one block, blocks that stay raw
        tails = (0, block_size // 2, 1, 3)
        sizes = [n for tail in tails for n in (2 * block_size + tail, 1, block_size // 3)]
        sizes += [block_size, 9]
        starts = cut(sizes, block_size)
        yield _case(f"block of {block_size}", starts, _noise(starts[-1]))
    starts = cut([1500, 40, 9, 700], 256)
    starts = starts[2:]
    n = int(starts[-1] - starts[0])
    yield _case("a part of the blocks", starts, _noise(n), first_byte=1048)
    yield _case("a part far away", starts + 2**40, _noise(n, 1), first_byte=2**41)
    for length in range(1, 12):  # each number of bits begins to pay at another length
        yield _case(f"one block of {length}", cut([length], 1024), _noise(length))
    yield _case("no values", cut([0], 1024), [])


def _special_values() -> Iterator[Case]:
    random = np.random.default_rng(7)
    for block_size in (100, 1024):
        starts = cut([3 * block_size + 37, 5], block_size)
        n = int(starts[-1])
        noise = random.standard_normal(n).astype(np.float32)
        zeros = np.zeros(n, np.float32)
        in_block = np.arange(n) % block_size
        values = {
            "zeros": zeros,
            "negative zeros": -zeros,
            "zeros of both signs": np.copysign(zeros, noise),
            "zeros among values": noise * (random.random(n) < 0.5),
            "one sign, positive": np.abs(noise),
            "one sign, negative": -np.abs(noise),
            "one constant": zeros + np.float32(0.1),
            "denormals": noise * np.float32(1e-40),
            "4-bit steps about the smallest": noise * np.float32(2e-37),
            "8-bit steps about the smallest": noise * np.float32(5e-36),
            "large": noise * np.float32(1e30),
            "one outlier": np.where(in_block == 11, -1e4, noise),
        }
        # alone in its block; equal ones; halfway between two codes, and beside that; not to be sent
        values["one value"] = np.where(in_block == 11, -1e30, 0)
        values["equal magnitudes"] = np.copysign(np.float32(0.7), noise)
        halves = 1.5 * 2.0 ** -(in_block // 4 % 18) * (1 + (in_block % 4 - 1) * 2.0**-23)
        values["halfway between magnitudes"] = np.where(
            in_block == 0, 1, np.copysign(halves, noise)
        )
        values["about the smallest largest"] = noise * np.float32(2.0**-113)
        for bits in (4, 8):
            largest = 2 ** (bits - 1) - 1
            ties = random.integers(-2 * largest, 2 * largest + 1, n) / 2
            beside = ties.astype(np.float32) * random.choice(
                np.float32([1 - 2**-24, 1, 1 + 2**-23]), n
            )
            values[f"ties of {bits} bits"] = np.where(in_block == 0, largest, ties)
            values[f"ties of {bits} bits and beside"] = np.where(in_block == 0, largest, beside)
        for name, v in values.items():
            yield Case(f"{name}, block of {block_size}", starts, v.astype(np.float32), -zeros)
        yield Case(f"cancelled, block of {block_size}", starts, noise, -noise)
    # blocks of one constant whose step is the smallest that is used, or some ulps beside it
    ulps = 1 + np.arange(-4, 5) * 2.0**-23
    v = np.concatenate([1e-37 * steps * ulps for steps in (7, 127)])
    v = np.repeat(v, 32).astype(np.float32)
    yield Case("blocks about the smallest step", cut([len(v)], 32), v, -np.zeros_like(v))


def _halfway() -> Iterator[Case]:
    """float16 and bfloat16 values, what lies halfway between two, and the neighbours of that."""
    largest = {"float16": 0x7BFF, "bfloat16": 0x7F7E}
    for name, last in largest.items():
        words = np.r_[0:64, 64:last:41, last - 1].astype(np.uint32)
        if name == "float16":
            here, above = ((words + i).astype(np.uint16).view(np.float16) for i in (0, 1))
        else:
            here, above = (((words + i) << 16).view(np.float32) for i in (0, 1))
        middle = ((here.astype(float) + above.astype(float)) / 2).astype(np.float32)
        below, beyond = (np.nextafter(middle, np.float32(end)) for end in (0, 1e38))
        v = np.concatenate([here, middle, below, beyond, [65504, 65519, 65520, 65536, 1e6]])
        v = np.concatenate([v, -v]).astype(np.float32)
        v = v[np.abs(v) < 1e34]  # so that sums stay finite
        yield Case(f"halfway between two {name}", cut([len(v)], 512), v, -np.zeros_like(v))


CASES: list[Case] = [*_block_sizes(), *_special_values(), *_halfway()]
