"""A fault-tolerant world of threads, for tests of failures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ... import runtime
from ...errors import RankFailed, UserError
from ...runtime import SimulatedFailure
from ..background import end_rank_tasks
from ..communicator import Communicator
from ..threads.communicator import ThreadCommunicator, ThreadWorld
from ..timeouts import TIMEOUT_S
from .next_group import Member, Membership, Role, new_membership
from .replay_log import WithReplayLog

Result = TypeVar("Result")


class SimulatedRendezvous:
    """Reconfigures the threads of a world.

    Args:
        size: number of training ranks.
        spares: number of standby ranks, numbered after the training ranks.
        timeout_s: longest wait of a rank, in seconds.
    """

    def __init__(self, size: int, spares: int, timeout_s: float) -> None:
        self.wanted, self.has_standby, self.timeout_s = size, spares > 0, timeout_s
        self.generation = 0
        self.new_membership = Membership(tuple(range(size)), tuple(range(size)), spares)
        self.world = ThreadWorld(size, timeout_s, copies=True)
        self._changed = runtime.Condition()
        self.failed_ranks: list[int] = []
        self._running = set(range(size + spares))
        self._members: dict[int, Member] = {
            rank: Member(rank, Role.STANDBY, -1, True) for rank in range(size, size + spares)
        }  # ranks that have come, or need not come

    def communicator(self, rank: int) -> RecoveringThread | None:
        """Return the communicator of a starting rank. A standby rank waits until it joins.

        Returns None for a standby rank never needed.
        """
        if rank < self.wanted:
            return RecoveringThread(self, rank)
        with self._changed:
            # bounded: for threads whose own waits have timeout_s
            self._changed.wait_for(
                lambda: rank in self.new_membership.ranks or self._all_finished()
            )
            return RecoveringThread(self, rank) if rank in self.new_membership.ranks else None

    def _all_finished(self) -> bool:
        finished = (m for m in self._members.values() if m.role == Role.FINISHED)
        return self._running.isdisjoint(set(self.new_membership.ranks) - {m.rank for m in finished})

    def fail(self, rank: int) -> None:
        """Record a failed rank, and interrupt all waiting ranks."""
        with self._changed:
            self._running.discard(rank)
            self.failed_ranks.append(rank)
            self._members.pop(rank, None)
            self.world.revoke()
            self._reconfigure_if_complete()
            self._changed.notify_all()

    def end(self, rank: int) -> None:
        """Record a finished rank."""
        with self._changed:
            self._members[rank] = Member(rank, Role.FINISHED, -1, True)
            self._reconfigure_if_complete()
            self._changed.notify_all()

    def meet(self, rank: int, place: int, allow_join: bool) -> None:
        """Wait until all remaining ranks have come, and form a new group."""
        with self._changed:
            number = self.generation
            self._members[rank] = Member(rank, Role.TRAINS, place, allow_join)
            self._reconfigure_if_complete()
            if not self._changed.wait_for(lambda: self.generation > number, self.timeout_s):
                raise UserError(f"rank {rank} waits for the other ranks after a rank failure")

    def _reconfigure_if_complete(self) -> None:
        members = [self._members[rank] for rank in self._running if rank in self._members]
        trains = [member.rank for member in members if member.role == Role.TRAINS]
        if len(members) < len(self._running) or not trains:
            return
        self.new_membership = new_membership(members, self.wanted)
        self.world = ThreadWorld(
            len(self.new_membership.ranks),
            self.timeout_s,
            world_ranks=self.new_membership.ranks,
            copies=True,
        )
        for joined in self.new_membership.joined:
            del self._members[self.new_membership.ranks[joined]]
        for rank in trains:
            del self._members[rank]
        self.generation += 1
        self._changed.notify_all()


class RecoveringThread(WithReplayLog, ThreadCommunicator):
    """A thread's view of a fault-tolerant world.

    Args:
        group: shared by all ranks.
        number: world rank of this rank, never changes.
    """

    fault_tolerant = True

    def __init__(self, group: SimulatedRendezvous, number: int) -> None:
        place = group.new_membership.ranks.index(number)
        ThreadCommunicator.__init__(self, group.world, place)
        WithReplayLog.__init__(self, standby=group.has_standby, joins=group.generation > 0)
        self._group, self._number, self.generation = group, number, group.generation

    def require_fixed_ranks(self, problem: str) -> None:
        raise UserError(problem)

    @property
    def spares(self) -> int:
        return min(self._group.new_membership.spares, self._group.wanted - self.size)

    @property
    def failed_ranks(self) -> tuple[int, ...]:
        return tuple(self._group.failed_ranks)

    def revoke(self) -> None:
        self._world.revoke()

    def _reconfigure(self, *, allow_join: bool) -> None:
        self._group.meet(self._number, self.rank, allow_join)
        self._world, self.generation = self._group.world, self._group.generation
        self.rank = self._group.new_membership.ranks.index(self._number)
        self.size, self._hosts, self._subworlds_made = self._world.size, None, 0
        self._share_replay_log()


def simulate_recovery(
    size: int,
    function: Callable[[Communicator], Result],
    *,
    spares: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> list[Result | None]:
    """Run `function(comm)` on fault-tolerant ranks, a thread each.

    A rank fails by raising `SimulatedFailure`.

    Args:
        size: number of training ranks.
        function: run on each rank.
        spares: number of standby ranks.
        timeout_s: longest wait of a rank, in seconds.
    Returns:
        The result of each rank, in world rank order, standby ranks last; None for failed ranks, and
        for standby ranks never needed.
    Raises:
        BaseException: any exception of a rank, except `SimulatedFailure`.
    """
    group = SimulatedRendezvous(size, spares, timeout_s)
    results: list[Result | None] = [None] * (size + spares)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            comm = group.communicator(rank)
            if comm is not None:
                if comm.generation:
                    comm.join()
                results[rank] = function(comm)
                group.end(rank)
        except SimulatedFailure:
            runtime.leave_process()
            results[rank] = None
            group.world.revoke()  # ends the rank's background tasks, too
            end_rank_tasks(lambda: group.fail(rank))
        except BaseException as error:
            errors.append(error)
            runtime.leave_process()
            group.world.abort()
            group.fail(rank)

    threads = [
        runtime.Thread(partial(run, rank), f"rank {rank}", process=rank)
        for rank in range(size + spares)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        # bounded: for threads whose own waits have timeout_s
        thread.join()
    causes = [error for error in errors if not isinstance(error, RankFailed)] or errors
    if causes:
        raise causes[0]
    return results
