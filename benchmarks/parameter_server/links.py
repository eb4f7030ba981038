"""Pushes and pulls of a whole model over emulated links: our learner beside the bare loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from parallel_sgd import Communicator
from parallel_sgd.command_line.cluster import BURST, payload_rate
from parallel_sgd.communication.mpi.init_timeout import kill_if_longer_than

from .bare import median_rates
from .dense import bare, ours

LONGER = 4  #: times as long as a case on one machine


def measure(comm: Communicator, values: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure on all ranks: a worker and a server, then workers on all ranks but the server's.

    Returns:
        "updates": a second, of all workers together, by "learner" or "bare", the number of workers,
        and the bits of a push; medians over the rounds. "where": mean seconds of an update of our
        learner in 32 bits, by the number of workers and `Seconds`.
    """
    where: dict[str, dict[str, float]] = {}
    cases: dict[str, Callable[[], float]] = {}
    for n in numbers(comm.size):
        spent = where[str(n)] = {}
        for bits, peer in ((32, "bare"), (1, "bare, 1 bit")):
            cases[f"bare, {n}, {bits}"] = partial(bare, comm, values, seconds, peer, n)
            cases[f"learner, {n}, {bits}"] = partial(
                ours, comm, values, seconds, {}, spent if bits == 32 else {}, workers=n, bits=bits
            )
    limit_s = 60 + 5 * (rounds + 1) * len(cases) * (seconds + 1)
    with kill_if_longer_than(limit_s, comm.rank, "the benchmark of links"):
        return {"updates": median_rates(comm, cases, rounds), "where": where}


def numbers(hosts: int) -> list[int]:
    """Return the numbers of workers: 1, and all hosts but the server's."""
    return sorted({1, hosts - 1})


def limit(workers: int, pushed: int, pulled: int, rate: float) -> float:
    """Return the most updates a second on links of a rate in bits/s.

    A single worker's messages follow each other on rested links: `BURST` bytes of each go at once.
    Several workers keep the server's link busy in both directions.

    Returns:
        Infinity if the links are not the limit.
    """
    sizes = [pushed, pulled]
    if workers == 1:
        beyond = sum(max(0, nbytes - BURST) for nbytes in sizes)
        return payload_rate(rate) / beyond if beyond else math.inf
    return payload_rate(rate) / max(sizes)
