"""Reconfigure the ranks of an MPI world after failures (ULFM).

All ranks started by mpiexec, standby ranks too, share a communicator, the rendezvous. Without
failures nothing is communicated in the rendezvous. A rank revokes the rendezvous after noticing a
failure, with all of its communicators, so every rank comes to `reconfigure`: the rendezvous is
shrunk to the remaining ranks, these report their roles, and the next group is split off. Then the
ranks agree, in a call not disturbed by failures, on the success of all of them; otherwise they
begin anew.

A finished rank waits in the rendezvous until all ranks have finished: a reconfiguration may need
it. Then every rank exits without MPI_Finalize, since MPI_Finalize hangs if ranks are missing.

Source: Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication
capability", IJHPCA 2013 (revoke, shrink, agree).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from contextlib import AbstractContextManager
from typing import NoReturn, cast

import numpy as np
from mpi4py import MPI

from ...errors import RanksLost
from ..backoff import Backoff
from ..liveness.abort import print_labelled
from ..liveness.rank_status import Status, report_status
from ..liveness.watchdog import Watchdog, standing_by
from ..phrases import in_words
from ..stderr import write_stderr
from .eviction import PeriodicEviction
from .next_group import Member, Membership, Role, new_membership
from .retry import RankFailures

_failures = RankFailures("the rendezvous")

_FINISHED = 2  #: tag: the sender's program has finished

_LONGEST_SLEEP_S = 0.02  #: longest sleep of a waiting rank between two checks


class Rendezvous:
    """Communicator of all ranks of the world, used for reconfigurations.

    Args:
        world: all ranks started by mpiexec.
        spares: number of standby ranks, the last ones of the world.
        watched: bounds the waits of training ranks.

    Attributes:
        wanted: number of ranks in a complete group.
        has_standby: there were standby ranks at the start.
        generation: number of reconfigurations so far.
        group: the present group.
        failed_ranks: world ranks known to have failed.
    """

    def __init__(self, world: MPI.Intracomm, spares: int, watched: Watchdog) -> None:
        # bounded: in ulfm_world's watched()
        self._comm, self._watched = world.Dup(), watched
        self._rank, self.wanted = world.rank, world.size - spares
        self.has_standby = spares > 0
        self.role = Role.TRAINS if self._rank < self.wanted else Role.STANDBY
        self._place = self._rank if self.role == Role.TRAINS else -1
        self._abandoned: list[MPI.Intracomm] = []  # kept alive for pending operations
        self.generation = 0
        self.group = Membership(tuple(range(self.wanted)), tuple(range(self.wanted)), spares)
        self.failed_ranks: list[int] = []
        self._known = list(range(world.size))
        self._finished: set[int] = set()
        self._failed: set[int] = set()  # failures seen before the next reconfiguration

    def first_group(self) -> MPI.Intracomm:
        """Return the first group. A standby rank waits, and returns the group it joins. Collective.

        A standby rank exits here if never needed.
        """
        with self._watched("Communicator.world()"):
            comm = self._split(self._comm, self.group)
            self._comm.Barrier()  # Open MPI crashes if a rank revokes it before all ranks have it
        if self.role == Role.TRAINS:
            return comm
        joined = self._wait()
        if joined is None:
            end_without_mpi(well=bool(self._finished))
        return joined

    def revoke(self) -> None:
        """Interrupt all ranks, so every rank calls `reconfigure`. Local."""
        self._comm.Revoke()

    def reconfigure(self, *, allow_join: bool) -> MPI.Intracomm | None:
        """Return the next group, or None if this rank has no place in it.

        Args:
            allow_join: this rank allows standby ranks to join now.

        Collective among all remaining ranks.
        """
        with self._waits("reconfigure"):
            while True:
                self.revoke()
                shrunk = cast(MPI.Intracomm, self._comm.Shrink())
                group, made = None, None
                with contextlib.suppress(RanksLost), _failures:
                    group = new_membership(self._members(shrunk, allow_join), self.wanted)
                    made = self._split(shrunk, group)
                    if shrunk.Get_failed().size:  # then received data may be invalid
                        made = None
                self._abandoned.append(self._comm)
                self._comm = shrunk
                if _all_agree(shrunk, made is not None):
                    assert group is not None and made is not None
                    return self._begin(group, made)

    def _begin(self, group: Membership, made: MPI.Intracomm) -> MPI.Intracomm | None:
        self.group, self.generation = group, self.generation + 1
        if self._rank not in group.ranks:
            return None
        self.role, self._place = Role.TRAINS, group.ranks.index(self._rank)
        return made

    def _members(self, comm: MPI.Intracomm, allow_join: bool) -> list[Member]:
        own = np.array([self._rank, self.role, self._place, allow_join], np.int64)
        gathered = np.empty((comm.size, own.size), np.int64)
        # bounded: reconfigure calls it in _waits()
        comm.Allgather(own, gathered)
        members = [
            Member(rank, Role(role), place, bool(theirs))
            for rank, role, place, theirs in gathered.tolist()
        ]
        alive = {member.rank for member in members}
        self.failed_ranks += [rank for rank in self._known if rank not in alive]
        self._known = sorted(alive)
        self._finished = {m.rank for m in members if m.role == Role.FINISHED}
        return members

    def _split(self, comm: MPI.Intracomm, group: Membership) -> MPI.Intracomm:
        if self._rank not in group.ranks:
            # bounded: its callers are in _watched() or _waits()
            return cast(MPI.Intracomm, comm.Split(MPI.UNDEFINED, 0))
        # bounded: its callers are in _watched() or _waits()
        return cast(MPI.Intracomm, comm.Split(0, group.ranks.index(self._rank)))

    def leave(self) -> None:
        """Wait until all training ranks have finished, then exit the process."""
        if self.role == Role.TRAINS:
            self.role, self._place = Role.FINISHED, -1
            self._report_finished()
            self._wait()
        end_without_mpi()

    def _report_finished(self) -> None:
        own = np.array([self._rank], np.int64)
        self._finished.add(self._rank)
        for peer, rank in enumerate(self._known):
            if rank != self._rank:
                with contextlib.suppress(RanksLost), _failures:
                    # bounded: so short that no receiver is needed
                    self._comm.Send(own, peer, _FINISHED)

    def _wait(self) -> MPI.Intracomm | None:
        """Wait until this rank joins a group, or all training ranks have finished (None)."""
        with standing_by("the training ranks"):
            return self._stand_by()

    def _stand_by(self) -> MPI.Intracomm | None:
        backoff = Backoff(time.sleep, first_s=1e-3, growth=1.5, longest_s=_LONGEST_SLEEP_S)
        timeout_s = self._watched.timeout_s
        eviction = PeriodicEviction(timeout_s)
        # bounded: while ranks train; PeriodicEviction ends stopped ranks
        while not self._all_finished():
            backoff.pause()
            if killed := eviction.evict_when_due():
                print_labelled(
                    f"parallel_sgd: waited more than timeout_s={timeout_s:g} s for "
                    f"{in_words(killed)}: killed; the remaining ranks continue"
                )
            try:
                self._receive_finished()
            except RanksLost:
                self._note_failures()
            if self._comm.Is_revoked():
                comm = self.reconfigure(allow_join=True)
                if comm is not None:
                    return comm
        return None

    def _receive_finished(self) -> None:
        with _failures:
            # bounded: while ranks train; PeriodicEviction ends stopped ranks
            while self._comm.Iprobe(MPI.ANY_SOURCE, _FINISHED):
                sender = np.empty(1, np.int64)
                # bounded: it is here, and short
                self._comm.Recv(sender, MPI.ANY_SOURCE, _FINISHED)
                self._finished.add(int(sender[0]))

    def _note_failures(self) -> None:
        """Record failed ranks. Any training ranks reconfigure without this rank's help."""
        failed = self._comm.Get_failed()
        self._comm.Ack_failed(failed.size)
        places = failed.Translate_ranks(None, self._comm.group)
        self._failed |= {self._known[place] for place in places}

    def _all_finished(self) -> bool:
        return (self._finished | self._failed).issuperset(self.group.ranks)

    def _waits(self, name: str) -> AbstractContextManager[object]:
        return self._watched(f"{name}, after a rank failure")


def _all_agree(comm: MPI.Intracomm, ready: bool) -> bool:
    """Return True if all remaining ranks are ready; the same result on all ranks."""
    with contextlib.suppress(RanksLost), _failures:
        # bounded: reconfigure calls it in _waits()
        return bool(comm.Agree(int(ready)))
    return False


def end_without_mpi(*, well: bool = True) -> NoReturn:
    """Exit the process without MPI_Finalize.

    Args:
        well: exit code 0, unless printed output could not be written.
    """
    try:
        with contextlib.suppress(ValueError, AttributeError):  # stdout is closed or missing
            sys.stdout.flush()
    except OSError as error:
        print_labelled(f"parallel-sgd: error: printed output could not be written: {error}")
        report_status(Status.FAILED)
        well = False
    report_status(Status.FINISHED if well else Status.LOST)
    write_stderr()
    os._exit(int(not well))
