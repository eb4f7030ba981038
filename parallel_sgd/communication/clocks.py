"""How far the clocks of the ranks are apart: hosts count time from their own beginnings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .communicator import Communicator

ROUNDS = 64  #: sums by which clocks are compared; the fastest of them decide


@dataclass(frozen=True)
class ClockReading:
    """A comparison with the clock of rank 0, in seconds.

    Attributes:
        at_s: when, on this rank's clock.
        ahead_s: what this rank's clock shows more than rank 0's.
        uncertain_s: `ahead_s` is right to within this.
    """

    at_s: float
    ahead_s: float
    uncertain_s: float


def compare_clocks(
    comm: Communicator, now: Callable[[], float] = time.perf_counter
) -> ClockReading:
    """Compare this rank's clock with that of rank 0, as every rank does at the same time.

    No rank leaves a sum over all ranks before all have entered it. So what one rank's clock shows
    as it leaves is later than what another's showed as that entered: each sum bounds the difference
    of two clocks from both sides, and the tightest bounds of many hold.

    Args:
        now: the clock.

    Collective: `ROUNDS` sums of one integer, which take some 10 µs each inside a machine, and one
    broadcast.
    """
    times, nothing = np.empty((ROUNDS, 2)), np.zeros(1, np.int64)
    for interval in times:
        interval[0] = now()
        comm.sum_integers(nothing)
        interval[1] = now()
    firsts = times.copy()
    comm.broadcast(firsts.reshape(-1))
    at_s = float(times[-1, 1])
    if comm.rank == 0:
        return ClockReading(at_s, 0.0, 0.0)
    least, most = (times[:, 0] - firsts[:, 1]).max(), (times[:, 1] - firsts[:, 0]).min()
    # A clock that is being set right meanwhile may make them cross a little.
    return ClockReading(at_s, float(least + most) / 2, abs(float(most - least)) / 2)


def rank_0_time(time_s: float, begin: ClockReading, end: ClockReading) -> float:
    """What the clock of rank 0 showed when this rank's showed `time_s`.

    Args:
        begin, end: this rank's comparisons; in between the clocks drift evenly. Local.
    """
    share = (time_s - begin.at_s) / (end.at_s - begin.at_s)
    return time_s - begin.ahead_s - share * (end.ahead_s - begin.ahead_s)
