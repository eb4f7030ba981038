"""Kill unresponsive ranks of this host, so that the remaining ranks can continue.

Works without MPI, so also after a communicator has failed. Everything here is local.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..liveness.heartbeat import (
    FRESH_S,
    SHOW_STACKS,
    SHOWN_S,
    Heartbeat,
    HeartbeatTable,
    RankState,
    own,
)
from ..liveness.watchdog import CHECK_INTERVAL_S, Wait, Watchdog
from ..phrases import in_words
from ..stderr import write_stderr
from .retry import raise_rank_failure

#: Shortest interval between two evictions by a standby or finished rank, in seconds.
_EVICTION_INTERVAL_S = 1.0

#: Time for MPI to report a failed rank, in seconds.
_MPI_REPORTS_S = 10.0


@dataclass(frozen=True)
class Unresponsive:
    """A rank without progress for a while.

    Attributes:
        heartbeat: heartbeat of the rank.
        state: state of the rank: waiting, standing by, computing, or not answering.
        seconds: time in this state.
    """

    heartbeat: Heartbeat
    state: RankState
    seconds: float

    @property
    def rank(self) -> int:
        return self.heartbeat.rank


def unresponsive(heartbeat_table: HeartbeatTable, for_s: float) -> list[Unresponsive]:
    """Return the ranks of this host without progress for more than `for_s` seconds, in rank order.

    Args:
        heartbeat_table: `heartbeat.own.heartbeat_table` on a rank.
        for_s: seconds; a healthy rank begins or ends a wait for ranks in this time.

    Waiting and standing-by ranks are usually victims; ranks in any other state are being waited
    for. Exited ranks are left out.
    """
    now, found = time.monotonic(), []
    for heartbeat in heartbeat_table.heartbeats():
        state = heartbeat.state(now)
        seconds = now - heartbeat.since(state)
        if state is not RankState.EXITED and seconds > for_s:
            found.append(Unresponsive(heartbeat, state, seconds))
    return found


def evict_unresponsive_ranks(heartbeat_table: HeartbeatTable, for_s: float) -> list[int]:
    """Kill the unresponsive ranks of this host. Return the killed ranks.

    Killed are ranks stopped or holding Python's lock for more than `for_s` seconds, and ranks
    computing as long while a rank of this host waits as long. Ranks not stopped write their stacks
    first.
    """
    found = unresponsive(heartbeat_table, for_s)
    states = {RankState.STOPPED, RankState.SILENT}
    if any(entry.state is RankState.WAITS for entry in found):
        states.add(RankState.COMPUTES)
    culprits = [entry for entry in found if entry.state in states]
    victims = {entry.rank for entry in found} - {entry.rank for entry in culprits}
    first = own.rank == min(victims, default=own.rank)  # all victims run this; one requests stacks
    return evict([entry.heartbeat for entry in culprits], show=first)


def evict(heartbeats: Sequence[Heartbeat], *, show: bool) -> list[int]:
    """Kill ranks of this host after they have written their stacks. Return the killed ranks.

    Args:
        heartbeats: heartbeats of the ranks.
        show: this rank requests the stacks; stopped ranks cannot write stacks.
    """
    now = time.monotonic()
    writing = [
        heartbeat for heartbeat in heartbeats if heartbeat.state(now) is not RankState.STOPPED
    ]
    if show:
        writing = [heartbeat for heartbeat in writing if heartbeat.signal(SHOW_STACKS)]
    if writing:
        time.sleep(SHOWN_S)
    return [heartbeat.rank for heartbeat in heartbeats if heartbeat.signal(signal.SIGKILL)]


class PeriodicEviction:
    """Evicts unresponsive ranks periodically, while the remaining ranks continue.

    Args:
        for_s: seconds without progress, as for `unresponsive`.

    After a pause of this process itself, no rank is evicted until the next check: all processes may
    have been stopped together.
    """

    def __init__(self, for_s: float) -> None:
        self._for_s, self._checked_s = for_s, time.monotonic()

    def evict_when_due(self) -> list[int]:
        """Evict unresponsive ranks, at most once a second. Call at least twice a second.

        Returns the killed ranks.
        """
        last_s = self._checked_s
        now = time.monotonic()
        if own.heartbeat_table is None or now - last_s < _EVICTION_INTERVAL_S:
            return []
        self._checked_s = now
        return (
            evict_unresponsive_ranks(own.heartbeat_table, self._for_s)
            if now - last_s < FRESH_S
            else []
        )


class EvictingWatchdog(Watchdog):
    """A watchdog of fault-tolerant ranks: kills unresponsive ranks in place of the whole job.

    Raises `RanksLost` in a wait for a failed rank.
    """

    def raise_rank_failure(self, error: BaseException, place: str) -> None:
        raise_rank_failure(error, place)

    def _can_continue(self, wait: Wait, now: float) -> bool:
        """Evict unresponsive ranks after a timeout. Return True if this rank may wait again.

        True if this rank has evicted a rank, or an awaited rank has exited just now.
        """
        if own.heartbeat_table is None:
            return False
        # Heartbeats are up to two checks old.
        for_s = max(self.timeout_s - 2 * CHECK_INTERVAL_S, self.timeout_s / 2)
        killed = evict_unresponsive_ranks(own.heartbeat_table, for_s)
        if killed:
            write_stderr(
                f"[rank {self._rank}] parallel_sgd: waited more than timeout_s={self.timeout_s:g} "
                f"s in {wait.name} for {in_words(killed)}: killed; the remaining ranks continue"
            )
        missing = [n.rank for n in own.neighbours() if n.state(now) is RankState.EXITED]
        if wait.counter is not None:  # otherwise an awaited rank may itself wait for any rank
            missing = [rank for rank in missing if rank in wait.counter.ranks]
        just_exited = [self._exited_just_now(rank, now) for rank in missing]
        return bool(killed) or any(just_exited)

    def _exited_just_now(self, rank: int, now: float) -> bool:
        """Return True if MPI may not have reported the exit of a world rank yet."""
        return now - self._first_missing.setdefault(rank, now) < _MPI_REPORTS_S

    def continues_without(self, rank: int) -> bool:
        """Evict a world rank silent for `timeout_s`. Return True if the remaining ranks continue.

        Also True if the rank has just exited, or is itself waiting: its own wait is checked
        elsewhere.
        """
        now = time.monotonic()
        neighbour = next((n for n in own.neighbours() if n.rank == rank), None)
        if neighbour is None:
            return False
        state = neighbour.state(now)
        if state is RankState.EXITED:
            return self._exited_just_now(rank, now)
        if state is RankState.WAITS:
            return True
        if state is RankState.STANDS_BY:  # its program has finished and sends no more requests
            return False
        write_stderr(
            f"[rank {self._rank}] parallel_sgd: rank {rank} has sent nothing for timeout_s="
            f"{self.timeout_s:g} s: killed; the remaining ranks continue"
        )
        return bool(evict([neighbour], show=True))
