"""Which ranks of a host let the others wait, as its board shows: for whoever goes on without them.

Works without MPI, so also where a communicator has failed. Everything here is local.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .heartbeat import FRESH_S, SHOW_STACKS, SHOWN_S, Heartbeat, HeartbeatTable, RankState, own

_LOOKS_EVERY_S = 1.0


@dataclass(frozen=True)
class Unresponsive:
    """A rank that has not moved for a while.

    Attributes:
        line: its own, on the board.
        conduct: whether it waits for others, stands by, computes, or cannot answer.
        seconds: for how long.
    """

    line: Heartbeat
    state: RankState
    seconds: float

    @property
    def rank(self) -> int:
        return self.line.rank


def unresponsive(heartbeat_table: HeartbeatTable, for_s: float) -> list[Unresponsive]:
    """The ranks of this host that have not moved for so long, in their order.

    Args:
        board: `board.own.board` on a rank.
        for_s: seconds in which a rank that moves begins or ends a wait for others.

    Those that wait for others, or stand by for them, are victims as a rule, and those that do
    anything else are waited for. Who is gone is not named.
    """
    now, found = time.monotonic(), []
    for line in heartbeat_table.lines():
        state = line.state(now)
        seconds = now - line.since(state)
        if state is not RankState.EXITED and seconds > for_s:
            found.append(Unresponsive(line, state, seconds))
    return found


def evict_unresponsive_ranks(heartbeat_table: HeartbeatTable, for_s: float) -> list[int]:
    """Kill the ranks of this host that others wait for in vain; which those are.

    They have been stopped or hold Python's lock for so long, or compute for so long while another
    rank of this host waits as long. Those that are not stopped write their stacks before.
    """
    found = unresponsive(heartbeat_table, for_s)
    states = {RankState.STOPPED, RankState.SILENT}
    if any(one.state is RankState.WAITS for one in found):
        states.add(RankState.COMPUTES)
    guilty = [one for one in found if one.state in states]
    victims = {one.rank for one in found} - {one.rank for one in guilty}
    first = own.rank == min(victims, default=own.rank)  # all come to this, and one of them asks
    return evict([one.line for one in guilty], show=first)


def evict(lines: Sequence[Heartbeat], *, show: bool) -> list[int]:
    """Kill ranks of this host when they have written their stacks; which those are.

    Args:
        show: whether this rank asks them to write; those that are stopped cannot.
    """
    now = time.monotonic()
    writing = [line for line in lines if line.state(now) is not RankState.STOPPED]
    if show:
        writing = [line for line in writing if line.signal(SHOW_STACKS)]
    if writing:
        time.sleep(SHOWN_S)
    return [line.rank for line in lines if line.signal(signal.SIGKILL)]


class PeriodicEviction:
    """Kills such ranks now and then, where the others go on without them.

    Args:
        for_s: seconds, as above.

    Where this process has been stopped itself it waits for another look: so may all have been.
    """

    def __init__(self, for_s: float) -> None:
        self._for_s, self._looked_s = for_s, time.monotonic()

    def evict_when_due(self) -> list[int]:
        """To be called at least twice a second; which ranks it has killed."""
        last_s = self._looked_s
        now = time.monotonic()
        if own.heartbeat_table is None or now - last_s < _LOOKS_EVERY_S:
            return []
        self._looked_s = now
        return (
            evict_unresponsive_ranks(own.heartbeat_table, self._for_s)
            if now - last_s < FRESH_S
            else []
        )
