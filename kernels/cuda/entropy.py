"""The entropy code on NVIDIA GPUs: the kernel launches for one message.

The position of a block in the message is known only after all blocks are coded. So each warp codes
into a slot of its own, and later launches move the contents of the slots together.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from ..entropy_reference import BLOCK, DAMAGED, checked_step, doubled, head_bytes
from .launch import over_warps

Array = Any
"""A contiguous ``cupy.ndarray``."""

_FILE = "entropy.cu"
_CHUNK = 1024  #: blocks positioned by a warp
_SLOT = 1024  #: words for the payload of a block
_NO_ROOM = -1  #: in place of a length


def encode_entropy(gradient: Array | None, residual: Array, payload: Array, step: float) -> int:
    """See `reference.encode_entropy`. Memory traffic: 12 bytes per value, and 3 times the message.

    Temporary memory: 2 bytes per value. Waits for the device once, and once more each time the step
    is doubled.
    """
    cupy: Any = importlib.import_module("cupy")
    n, blocks, chunks = residual.size, *_counts(residual.size)
    slots, headers = cupy.empty(_SLOT * blocks, np.uint32), cupy.empty(blocks, np.uint32)
    extents, sums = cupy.empty(blocks, np.uint64), cupy.empty(chunks, np.uint64)
    length, size, room = cupy.empty(1, np.int64), np.int64(n), np.int64(payload.size)
    used = checked_step(n, payload, step)
    while True:
        if blocks:
            vectors = (residual if gradient is None else gradient), residual
            numbers = size, used, np.float32(1) / used, np.int32(gradient is not None)
            over_warps(_FILE, "code_blocks", blocks, (*vectors, slots, headers, *numbers))
            over_warps(_FILE, "place_blocks", chunks, (headers, extents, sums, size))
        arrays = slots, headers, extents, sums, payload, length
        over_warps(_FILE, "write_message", max(blocks, 1), (*arrays, size, room, used))
        total = int(length.item())
        if total != _NO_ROOM:
            return total
        over_warps(_FILE, "put_back", blocks, (slots, headers, residual, size, used))
        gradient, used = None, doubled(used)


def decode_entropy(payload: Array, out: Array, add: bool) -> int:
    """See `reference.decode_entropy`. Memory traffic: 4 bytes per value, and the message.

    With `add`, the traffic is the message and the 32-byte sectors with live values, read and
    written. Waits for the device once.
    """
    cupy: Any = importlib.import_module("cupy")
    n, blocks, chunks = out.size, *_counts(out.size)
    if payload.size < head_bytes(n):
        return DAMAGED
    headers = cupy.empty(blocks, np.uint32)
    extents, sums = cupy.empty(blocks, np.uint64), cupy.empty(chunks, np.uint64)
    result, size, room = cupy.zeros(3, np.uint32), np.int64(n), np.int64(payload.size)
    found = payload, headers, extents, sums
    over_warps(_FILE, "find_blocks", max(chunks, 1), (*found, result, size, room))
    numbers = size, np.int32(add)
    over_warps(_FILE, "decode_blocks", max(blocks, 1), (*found, out, result, *numbers))
    total, *damage = cupy.asnumpy(result).tolist()
    return DAMAGED if any(damage) else total


def _counts(n: int) -> tuple[int, int]:
    """Return the number of blocks, and of chunks of blocks."""
    blocks = -(-n // BLOCK)
    return blocks, -(-blocks // _CHUNK)
