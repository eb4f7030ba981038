"""The kernels on NVIDIA GPUs: CuPy arrays in, CuPy arrays out, on CuPy's current stream.

The functions are those of `reference`, with the same bytes; see there for their descriptions. The
kernels are the .cu files in this folder. They run at the speed of memory: a warp reads a block
once, holds it in registers, and writes it once. Blocks of more than 1024 values are correct, but
every pass reads them again. Arrays must be contiguous, payloads aligned to 4 bytes.

The first call imports CuPy, and compiles the kernel.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from ..blocks import Blocks
from ..top_k_reference import position_bits
from .entropy import decode_entropy, encode_entropy
from .launch import over_blocks, over_elements

__all__ = ["decode_entropy", "encode_entropy"]

Array = Any
"""A contiguous ``cupy.ndarray``."""

_MOST_GRID = 1024  # fills the largest GPU; each warp then makes a single atomic update


def encode_1bit(
    blocks: Blocks, gradient: Array, residual: Array, payload: Array, mean_threshold: bool
) -> None:
    """See `reference.encode_1bit`. Memory traffic: 12.125 bytes per value."""
    over_blocks("one_bit.cu", "encode_1bit", blocks, (gradient, residual, payload), mean_threshold)


def decode_1bit(blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
    """See `reference.decode_1bit`. Memory traffic: 8.125 bytes per value, 4.125 to set."""
    over_blocks("one_bit.cu", "decode_1bit", blocks, (payload, out), add)


def encode_levels(
    bits: int, blocks: Blocks, gradient: Array, residual: Array, payload: Array
) -> None:
    """See `reference.encode_levels`. Memory traffic: 12 bytes per value, and the code."""
    arrays = (gradient, residual, payload)
    over_blocks("levels.cu", "encode_levels", blocks, arrays, BITS=bits)


def decode_levels(bits: int, blocks: Blocks, payload: Array, out: Array, add: bool) -> None:
    """See `reference.decode_levels`. Memory traffic: 8 bytes per value, 4 to set, and the code."""
    over_blocks("levels.cu", "decode_levels", blocks, (payload, out), add, BITS=bits)


def encode_top_k(
    kept: int, block_size: int, blocks: Blocks, gradient: Array, residual: Array, payload: Array
) -> None:
    """See `reference.encode_top_k`. Memory traffic: 12 bytes per value, and passes in the caches.

    A warp makes 35 passes over its block.
    """
    arrays, bits = (gradient, residual, payload), position_bits(block_size)
    numbers = kept, block_size
    over_blocks("top_k.cu", "encode_top_k", blocks, arrays, *numbers, POSITION_BITS=bits)


def decode_top_k(
    kept: int, block_size: int, blocks: Blocks, payload: Array, out: Array, add: bool
) -> None:
    """See `reference.decode_top_k`. Memory traffic: 4 bytes per value to set, and what is sent."""
    arrays, bits = (payload, out), position_bits(block_size)
    numbers = add, kept, block_size
    over_blocks("top_k.cu", "decode_top_k", blocks, arrays, *numbers, POSITION_BITS=bits)


def encode_half(gradient: Array, residual: Array, payload: Array, bfloat: bool) -> None:
    """See `reference.encode_half`. Memory traffic: 14 bytes per value."""
    arrays = (gradient, residual, payload.view(np.uint16))
    over_elements("half.cu", "encode_half", arrays, np.int32(bfloat))


def decode_half(payload: Array, out: Array, add: bool, bfloat: bool) -> None:
    """See `reference.decode_half`. Memory traffic: 10 bytes per value, 6 to set."""
    arrays = (payload.view(np.uint16), out)
    over_elements("half.cu", "decode_half", arrays, np.int32(add), np.int32(bfloat))


def largest_magnitude(x: Array) -> float:
    """See `reference.largest_magnitude`. Waits for the device once."""
    cupy: Any = importlib.import_module("cupy")
    words = x.view(np.dtype(f"u{x.itemsize}"))
    largest = cupy.zeros(1, words.dtype)
    arrays = (words, largest)
    over_elements("largest.cu", "largest_magnitude", arrays, bits=_bits(x), most_grid=_MOST_GRID)
    return float(largest.view(x.dtype).item())


def sgd_step(x: Array, gradient: Array, lr: float, out: Array | None = None) -> None:
    """See `reference.sgd_step`. Memory traffic: 3 values per element."""
    arrays, number = (x, gradient, _new(x, out)), x.dtype.type(lr)
    over_elements("optimizer_steps.cu", "sgd_step", arrays, number, bits=_bits(x))


def momentum_step(
    x: Array,
    m: Array,
    gradient: Array,
    lr: float,
    momentum: float,
    gain: float,
    nesterov: bool,
    out: Array | None = None,
) -> None:
    """See `reference.momentum_step`. Memory traffic: 5 values per element."""
    numbers = *map(x.dtype.type, (lr, momentum, gain)), np.int32(nesterov)
    arrays = (x, m, gradient, _new(x, out))
    over_elements("optimizer_steps.cu", "momentum_step", arrays, *numbers, bits=_bits(x))


def adam_step(
    x: Array,
    m: Array,
    v: Array,
    gradient: Array,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    out: Array | None = None,
) -> None:
    """See `reference.adam_step`. Memory traffic: 7 values per element."""
    numbers = map(x.dtype.type, (scale, lr, 1 - beta1, 1 - beta2, epsilon, decay))
    arrays = (x, m, v, gradient, _new(x, out))
    over_elements("optimizer_steps.cu", "adam_step", arrays, *numbers, bits=_bits(x))


def adam_step_of_quantized(
    x: Array,
    m: Array,
    v: Array,
    gradient: Array,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
    slopes: Array,
    shifts: Array,
    first: int,
    least: float,
    out: Array | None = None,
) -> None:
    """See `reference.adam_step_of_quantized`. Memory traffic: 7 values per element."""
    reals = map(x.dtype.type, (scale, lr, 1 - beta1, 1 - beta2, epsilon, decay, least))
    arrays, numbers = (x, m, v, gradient, _new(x, out), slopes, shifts), (np.int64(first), *reals)
    over_elements("optimizer_steps.cu", "adam_step_of_quantized", arrays, *numbers, bits=_bits(x))


def add_to_groups(values: Array, first: int, step: int, sums: Array) -> None:
    """See `reference.add_to_groups`; a thread for each group. Memory traffic: 1 value per element.

    The accesses of a warp are not contiguous.
    """
    numbers = np.int64(values.size), np.int64(first), np.uint64(step)
    over_elements("optimizer_steps.cu", "add_to_groups", (sums, values), *numbers, bits=_bits(sums))


def adagrad_step(
    x: Array,
    s: Array,
    gradient: Array,
    scale: float,
    lr: float,
    epsilon: float,
    out: Array | None = None,
) -> None:
    """See `reference.adagrad_step`. Memory traffic: 5 values per element."""
    numbers = map(x.dtype.type, (scale, lr, epsilon))
    arrays = (x, s, gradient, _new(x, out))
    over_elements("optimizer_steps.cu", "adagrad_step", arrays, *numbers, bits=_bits(x))


def compensate_delay(gradient: Array, x: Array, backup: Array, factor: float) -> None:
    """See `reference.compensate_delay`. Memory traffic: 4 values per element."""
    arrays, number = (gradient, x, backup), x.dtype.type(factor)
    over_elements("optimizer_steps.cu", "compensate_delay", arrays, number, bits=_bits(x))


def low_rank_product(p: Array, q: Array, out: Array, rank: int, subtract: bool) -> None:
    """See `reference.low_rank_product`. Memory traffic: 1 value per element, 2 to subtract."""
    columns, arrays = np.int64(len(q) // rank), (out, p, q)
    numbers = columns, np.int32(rank), np.int32(subtract)
    over_elements("low_rank.cu", "low_rank_product", arrays, *numbers, bits=_bits(out))


def weighted_difference(x: Array, start: Array, weight: float, out: Array | None = None) -> float:
    """See `reference.weighted_difference`. Memory traffic: 3 values per element.

    Waits for the device once.
    """
    cupy: Any = importlib.import_module("cupy")
    largest = cupy.zeros(1, np.dtype(f"u{x.itemsize}"))
    arrays, number = (x, start, _new(x, out), largest), x.dtype.type(weight)
    chosen = {"bits": _bits(x), "most_grid": _MOST_GRID}
    over_elements("outer_steps.cu", "weighted_difference", arrays, number, **chosen)
    return float(largest.view(x.dtype).item())


def averaging_step(x: Array, gradient: Array) -> None:
    """See `reference.averaging_step`. Memory traffic: 4 values per element."""
    over_elements("outer_steps.cu", "averaging_step", (x, gradient), bits=_bits(x))


def outer_momentum_step(
    x: Array,
    m: Array,
    gradient: Array,
    lr: float,
    momentum: float,
    gain: float,
    nesterov: bool,
) -> None:
    """See `reference.outer_momentum_step`. Memory traffic: 6 values per element."""
    numbers = *map(x.dtype.type, (lr, momentum, gain)), np.int32(nesterov)
    arrays = (x, m, gradient)
    over_elements("outer_steps.cu", "outer_momentum_step", arrays, *numbers, bits=_bits(x))


def mix(x: Array, common: Array, weight: float) -> None:
    """See `reference.mix`. Memory traffic: 3 values per element."""
    number = x.dtype.type(weight)
    over_elements("outer_steps.cu", "mix", (x, common), number, bits=_bits(x))


def _new(x: Array, out: Array | None) -> Array:
    return x if out is None else out


def _bits(x: Array) -> int:
    return 8 * int(x.itemsize)
