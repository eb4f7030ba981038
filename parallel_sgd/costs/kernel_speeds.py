"""Measurement of this rank's kernel speeds (encode, decode, add) for the cost model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from copy import copy
from functools import cache, partial
from typing import Any

import numpy as np

from ..communication.messages import PIECE_VALUES
from ..compression import (
    Allowance,
    Codec,
    EntropyCoded,
    VariableMessage,
    codec_for,
    registered_bits,
    sampled_values,
)
from ..kernels import Blocks, array_module, empty_like, finish_on_device, memory
from ..parameters import Parameters
from .model import KernelSpeeds, StepSearch

Array = Any  #: a NumPy or CuPy array

VALUES = 1 << 23  #: 32 MiB per vector: larger than caches, so each kernel starts from memory
FEW_SEARCHED, MANY_SEARCHED = 1 << 12, 127 << 11  #: values, all of which a step is found from
IN_CACHE = 64  #: blocks added by an owner at a time
REPEATS = 5  #: the fastest counts, since disturbances only slow a kernel down


def measure_kernel_speeds(
    block_size: int = 1024,
    bits: Collection[float] = (),
    like: Array | None = None,
    values: int = VALUES,
) -> KernelSpeeds:
    """Time every kernel of an exchange on float32 vectors.

    Args:
        block_size: of the codecs.
        bits: of the codecs to measure; default: all registered. 32, the plain sum, is always
            measured.
        like: an array on the device of the exchange's vectors, NumPy or CuPy; None: NumPy.
        values: in each vector, a multiple of 65536; with few, kernels start from caches.

    Local. Cost: about 0.2 s and 100 MB, after the kernels are loaded.
    """
    like = memory.empty(1, np.float32) if like is None else like
    parameters = Parameters({"W": empty_like(like, values, np.float32)})
    vector, residual = parameters.flat, empty_like(like, values, np.float32)
    # Repeat a tile of random numbers, since generating many is slow. As in a model, scales
    # vary: the speed of an entropy code depends on the distribution.
    random = np.random.default_rng(0)
    scales = np.exp(1.5 * random.standard_normal(1 << 8, np.float32))
    tile = random.standard_normal(1 << 16, np.float32) * np.repeat(scales, 1 << 8)
    vector.reshape(-1, tile.size)[...] = array_module(like).asarray(tile)
    residual.fill(0)
    encode: dict[float, float] = {32: math.inf}
    decode: dict[float, float] = {32: math.inf}
    decode_add: dict[float, float] = {32: _sum_speed(vector, residual)}
    searches: dict[float, StepSearch] = {}
    for number in bits or registered_bits():
        if number < 32:
            codec = codec_for(number, block_size=block_size)
            encode[number], decode[number], decode_add[number] = _codec_speeds(
                codec, parameters, residual
            )
            if isinstance(codec, EntropyCoded):
                searches[number] = _step_search(codec, vector, residual)
    return KernelSpeeds(encode, decode, decode_add, searches)


def _step_search(codec: EntropyCoded, vector: Array, residual: Array) -> StepSearch:
    """Return the time in which a step size is found, from a short and a long vector."""
    few, many = FEW_SEARCHED, min(MANY_SEARCHED, vector.size)
    pairs = [(vector[:size], residual[:size]) for size in (few, many)]
    residual.fill(0)
    few_s, many_s = (_least_s(partial(Allowance, codec, [pair]), vector) for pair in pairs)
    value_s = max(0.0, many_s - few_s) / (sampled_values(many) - sampled_values(few))
    return StepSearch(max(0.0, few_s - sampled_values(few) * value_s), value_s)


def _codec_speeds(
    codec: Codec, parameters: Parameters, residual: Array
) -> tuple[float, float, float]:
    """Return the speeds of encoding, of decoding, and of decoding and adding."""
    vector, blocks = parameters.flat, codec.blocks(parameters)
    if not codec.has_fixed_length:
        return _variable_speeds(codec, blocks, vector, residual)
    payload = empty_like(vector, blocks.bytes.stop, np.uint8)
    starts = range(0, len(blocks), _at_a_time(vector, len(blocks), IN_CACHE))
    parts = [blocks.part(a, min(a + starts.step, len(blocks))) for a in starts]
    total = residual[: parts[0].values.stop]

    def encode() -> None:
        codec.encode(blocks, vector, residual, payload)

    def decode() -> None:
        codec.decode(blocks, payload, vector, add=False)

    def add() -> None:  # received data come from memory, the sum stays in cache
        for part in parts:
            size = part.values.stop - part.values.start
            codec.decode(part, payload[part.bytes], total[:size], add=True)

    return _speed(encode, vector), _speed(decode, vector), _speed(add, vector)


def _variable_speeds(
    codec: Codec, blocks: Blocks, vector: Array, residual: Array
) -> tuple[float, float, float]:
    """Return the same speeds for messages of variable length: pieces, with a common step size."""
    piece = blocks.part(0, PIECE_VALUES // codec.block_size)
    message, size = VariableMessage(codec, piece), piece.values.stop
    pieces = [slice(first, first + size) for first in range(0, vector.size, size)]
    room = piece.bytes.stop
    payload = empty_like(vector, room * len(pieces), np.uint8)
    places = [payload[room * i : room * (i + 1)] for i in range(len(pieces))]
    residual.fill(0)
    found = cache(lambda codec: Allowance(codec, [(vector, residual)]))  # timed by itself

    def encode() -> None:
        allowance_of = cache(lambda codec: copy(found(codec)))
        for values, place in zip(pieces, places, strict=True):
            message.encode(vector[values], residual[values], place, allowance_of)

    def decode() -> None:
        for values, place in zip(pieces, places, strict=True):
            message.decode(place, residual[values], False)

    def add() -> None:
        total = residual[:size]
        for place in places:
            message.decode(place, total, True)

    return _speed(encode, vector), _speed(decode, vector), _speed(add, vector)


def _sum_speed(vector: Array, residual: Array) -> float:
    """Return the speed of adding received values in full precision."""
    step = _at_a_time(vector, vector.size, IN_CACHE * 1024)
    total = residual[:step]

    def add() -> None:
        for begin in range(0, vector.size, step):
            part = vector[begin : begin + step]
            total[: part.size] += part

    return _speed(add, vector)


def _at_a_time(vector: Array, whole: int, part: int) -> int:
    """Return the number of units per kernel call: `part` on a CPU, `whole` on a GPU."""
    return part if array_module(vector) is np else whole


def _speed(call: Callable[[], None], vector: Array) -> float:
    """Return values per second."""
    return int(vector.size) / _least_s(call, vector)


def _least_s(call: Callable[[], object], vector: Array) -> float:
    """Return the seconds of the fastest of several calls."""
    seconds = []
    for _ in range(REPEATS):
        finish_on_device(vector)
        begin = time.perf_counter()
        call()
        finish_on_device(vector)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
