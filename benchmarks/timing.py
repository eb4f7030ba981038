"""Seconds of calls: in this process, or on all ranks together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from parallel_sgd import Communicator

Call = Callable[[], object]


def seconds_of(call: Call, comm: Communicator | None = None, *, repeat: int = 1) -> float:
    """Return the seconds of one call, the mean of `repeat` calls.

    Args:
        comm: all ranks begin together, and the slowest rank counts. Collective.
    """
    if comm:
        comm.barrier()
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    seconds = (time.perf_counter() - begin) / repeat
    return max(comm.allgather_object(seconds)) if comm else seconds


def in_turn(
    calls: Mapping[str, Call],
    rounds: int,
    comm: Communicator | None = None,
    *,
    before: Call | None = None,
    warm_up: int = 1,
    repeat: int = 1,
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round, all calls in turn.

    Args:
        comm, repeat: see `seconds_of`.
        before: called before each call, outside of its time.
        warm_up: rounds that come first and do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up + rounds):
        for name, call in calls.items():
            if before:
                before()
            seconds[name].append(seconds_of(call, comm, repeat=repeat))
    return {name: of_call[warm_up:] for name, of_call in seconds.items()}


def median_s(call: Call, rounds: int, comm: Communicator | None = None, **how: Any) -> float:
    """Return the median seconds of one call, with the options of `in_turn`."""
    return statistics.median(in_turn({"": call}, rounds, comm, **how)[""])
