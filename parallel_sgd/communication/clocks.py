"""Compare the clocks of the ranks: each host counts time from its own start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .. import runtime
from .communicator import Communicator

ROUNDS = 64  #: sums in a comparison of clocks; the fastest sums give the tightest bounds


@dataclass(frozen=True)
class ClockReading:
    """A comparison with the clock of rank 0, in seconds.

    Attributes:
        at_s: time of the comparison, on this rank's clock.
        ahead_s: this rank's clock minus rank 0's clock.
        uncertain_s: largest error of `ahead_s`.
    """

    at_s: float
    ahead_s: float
    uncertain_s: float


def compare_clocks(
    comm: Communicator, now: Callable[[], float] = runtime.perf_counter
) -> ClockReading:
    """Compare this rank's clock with that of rank 0, at the same time on every rank.

    No rank leaves a sum over all ranks before all ranks have entered it. So rank A leaves at a
    later time than rank B entered. Each sum thus bounds the difference of two clocks from both
    sides; the tightest bounds of many sums are used.

    Args:
        comm: the ranks.
        now: the clock.
    Returns:
        The comparison for this rank.

    Collective: `ROUNDS` sums of one integer, some 10 µs each inside a machine, and one broadcast.
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
    # If a clock is adjusted meanwhile, the bounds may cross a little.
    return ClockReading(at_s, float(least + most) / 2, abs(float(most - least)) / 2)


def rank_0_time(time_s: float, begin: ClockReading, end: ClockReading) -> float:
    """Convert a time of this rank's clock to the clock of rank 0. Local.

    Args:
        time_s: time on this rank's clock, in seconds.
        begin, end: this rank's comparisons; in between the clocks drift linearly.
    """
    share = (time_s - begin.at_s) / (end.at_s - begin.at_s)
    return time_s - begin.ahead_s - share * (end.ahead_s - begin.ahead_s)
