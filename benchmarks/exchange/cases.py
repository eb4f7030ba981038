"""The cases that are compared over links, by the names of the table; and a turn of a case."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

ALLREDUCE, GLOO, AUTO = "MPI_Allreduce", "gloo", "auto"

BITS = (32, 8, 4, 2, 1, 0.5, 0.25, 0.1)

#: Bits of ours, and the other options of its exchange.
OURS: dict[str, tuple[float, dict[str, str]]] = {
    "32 bit, collective": (32, {"transport": "collective"}),
    **{f"{bits} bit, pipelined": (bits, {"transport": "pipelined"}) for bits in BITS},
    "1 bit as signs, pipelined": (1, {"transport": "pipelined", "code": "sign"}),
    "1 bit, collective": (1, {"transport": "collective"}),
}

CHECKED = 1024  #: values of which a turn says how far they are from the sum


def vector_of(rank: int, values: int) -> Array:
    """Return a rank's addend."""
    return np.random.default_rng(rank).standard_normal(values, np.float32)


def turn(
    given: Array,
    total: Array,
    ranks: int,
    times: int,
    barrier: Callable[[], object],
    call: Callable[[], object],
) -> dict[str, Any]:
    """Sum up `times` times, all ranks at once, and once more before.

    The first call is not counted: TCP still has the rate of the case before, and takes a while to
    recover from lost packets.

    Args:
        given: this rank's vector.
        total: room for the sum; gets the vector before each call.
    Returns:
        "seconds": of this rank, for each call but the first; "error": of the first values after the
        last call, relative to the largest; "digest": of the sum, for a comparison of ranks.
    """
    seconds = []
    for _ in range(1 + times):
        total[...] = given
        barrier()
        begin = perf_counter()
        call()
        seconds.append(perf_counter() - begin)
    barrier()  # what others still wait for is sent
    few = min(CHECKED, given.size)
    exact = np.sum([vector_of(rank, few) for rank in range(ranks)], axis=0, dtype=np.float64)
    error = np.abs(total[:few] - exact).max() / np.abs(exact).max()
    digest = zlib.crc32(total[:: 1 + total.size // 100_000].tobytes())
    return {"seconds": seconds[1:], "error": float(error), "digest": digest}
