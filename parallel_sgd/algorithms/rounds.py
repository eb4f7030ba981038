"""Outer steps without late ranks: a coordinator chooses the ranks of each outer step, of a round.

At the end of a block a rank asks the coordinator, on rank 0, and waits for the answer. A round
begins once all ranks ask, or `grace_s` seconds after a quorum asks. A quorum is more than half of
the ranks, so any two rounds in a row have a rank in common: a rank with the newest model.

A rank about to meet all ranks, to evaluate, save or finish, asks too. The rank takes part in the
rounds of late ranks until all ranks have come.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from .. import runtime
from ..communication import HEADER_LENGTH, Communicator, Endpoint, InBackground, Subset
from ..communication.endpoint import Header
from ..errors import SharedError, UserError
from ..options import Options, Real, Whole, option, options
from ..state import Component

Array = Any  #: a NumPy or CuPy array

COORDINATOR = 0  #: the coordinator's rank


class Call(IntEnum):
    """A rank's message to the coordinator."""

    BLOCK = 1  #: the rank's block has ended
    MEETING = 2  #: the rank is about to meet all ranks
    PROBLEM = 3  #: the rank is about to tell all ranks of a problem


class Answer(IntEnum):
    """The coordinator's answer to a rank."""

    ROUND = 1  #: take part in a round; the body marks the ranks of the round, uint8 [ranks]
    MEET = 2  #: all ranks are about to meet
    PROBLEM = 3  #: a rank is about to tell all ranks of a problem
    GONE = 4  #: the rank with the given number has finished its program


def weight_after(age: int) -> float:
    """Return the weight of a rank's change of a model that lacks `age` outer steps.

    Source: Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", IJCAI 2016,
    eq. 6, where the rate is divided by the staleness, which counts from 1.
    """
    return 1 / (1 + age)


@options
class Quorum(Options):
    """Options for outer steps without late ranks. By default every outer step has all ranks."""

    quorum: int | None = option(
        None,
        Whole(1),
        "take an outer step once so many ranks have ended their blocks, more than half of all: "
        "who is late joins the next one (default: all; with grace_s: the majority)",
    )
    grace_s: float = option(
        0.0, Real(), "seconds that a quorum waits for the other ranks before its outer step"
    )

    @property
    def given(self) -> bool:
        return self.quorum is not None or self.grace_s > 0

    def of(self, ranks: int) -> int:
        """Return the number of ranks in a quorum.

        Raises:
            SharedError: not a majority of these ranks. The same on all ranks.
        """
        most = ranks // 2 + 1
        quorum = most if self.quorum is None else self.quorum
        if not most <= quorum <= ranks:
            raise SharedError(
                f"quorum={quorum} must be {most} to {ranks} on {ranks} ranks: more than half, so "
                "that two outer steps in a row have a rank in common"
            )
        return quorum


class Coordinator:
    """Chooses the ranks of each round. Runs on rank 0, beside training.

    Args:
        endpoint: serving all ranks.
        quorum, grace_s: see `Quorum`.

    Local.
    """

    def __init__(self, endpoint: Endpoint, quorum: int, grace_s: float) -> None:
        self._endpoint, self._quorum, self._grace_s = endpoint, quorum, grace_s
        self._asking: dict[int, Call] = {}
        self._quorum_since: float | None = None
        self._told: set[int] = set()  # ranks told of a problem
        self._stopped = runtime.Event()

    def run(self) -> None:
        """Answer the ranks until `stop`."""
        endpoint, backoff = self._endpoint, self._endpoint.backoff()
        try:
            # bounded: by stop(), of this rank's learner
            while not self._stopped.is_set():
                arrived = endpoint.arrivals()
                for rank, header in arrived:
                    self._asking[rank] = Call(int(header[0]))
                    endpoint.listen(rank)
                if self._answer() or arrived:
                    backoff.reset()
                else:
                    backoff.pause()
        finally:
            endpoint.close()

    def stop(self) -> None:
        self._stopped.set()

    def _answer(self) -> bool:
        """Answer the ranks, if it is time. Return True if so."""
        asking, calls, size = self._asking, set(self._asking.values()), len(self._endpoint.peers)
        if Call.PROBLEM in calls or self._told:
            self._told |= asking.keys()
            self._send(Answer.PROBLEM)
            if len(self._told) == size:
                self._told = set()
            return bool(asking)
        if len(asking) == size:
            self._send(Answer.ROUND if Call.BLOCK in calls else Answer.MEET)
            return True
        if not asking:
            return False
        gone = [rank for rank in self._endpoint.finished_peers() if rank not in asking]
        if gone:
            self._send(Answer.GONE, gone[0])
            return True
        if Call.BLOCK not in calls or len(asking) < self._quorum:
            return False
        now = runtime.monotonic()
        self._quorum_since = now if self._quorum_since is None else self._quorum_since
        if now - self._quorum_since < self._grace_s:
            return False
        self._send(Answer.ROUND)
        return True

    def _send(self, answer: Answer, number: int = 0) -> None:
        """Answer all ranks that ask."""
        header = np.zeros(HEADER_LENGTH, np.int64)
        header[:2] = answer, number
        marks = np.zeros(len(self._endpoint.peers), np.uint8)
        marks[[*self._asking]] = 1
        body = marks if answer == Answer.ROUND else None
        sent = [self._endpoint.send(rank, header, body) for rank in self._asking]
        self._endpoint.finish(sent, "a round's beginning")
        self._asking, self._quorum_since = {}, None


class Rounds(Component):
    """This rank's part in the rounds of all ranks.

    Args:
        comm: the ranks.
        quorum: of `Quorum`.

    Attributes:
        taken: rounds that this rank has taken part in.
        late: those joined with a change of an older model.
        oldest: the most outer steps missing in such a model.

    Creation and `close` are collective.
    """

    def __init__(self, comm: Communicator, quorum: Quorum) -> None:
        self._coordination, self._exchanging = comm.duplicate(), comm.duplicate()
        self._comm, self._bytes_sent = comm, 0
        self.taken = self.late = self.oldest = 0
        self._task: InBackground[None] | None = None
        if comm.rank == COORDINATOR:
            endpoint = self._coordination.endpoint(range(comm.size), serving=True)
            coordinator = Coordinator(endpoint, quorum.of(comm.size), quorum.grace_s)
            name = "coordinator of outer steps"  # asked for its error in `_answer`
            self._task = InBackground(name, coordinator.run, coordinator.stop, reports=False)
            dropped = weakref.finalize(self, self._task.stop)
            dropped.atexit = False  # at exit, the shutdown stops the task in its order
        self._endpoint = self._coordination.endpoint([COORDINATOR], serving=False)

    def ask(self, call: Call) -> tuple[Answer, list[int]]:
        """Ask the coordinator, and wait for its answer.

        Returns:
            The answer, and with `Answer.ROUND` the round's ranks.
        Raises:
            UserError: a rank has finished its program, or none has answered for `timeout_s`.

        Waits for the other ranks, as told above.
        """
        endpoint, header = self._endpoint, np.zeros(HEADER_LENGTH, np.int64)
        header[0] = call
        with self._comm.trace.span("wait"):
            sent = endpoint.send(COORDINATOR, header)
            with endpoint.watched("the beginning of an outer step", COORDINATOR):
                reply = endpoint.until(self._answer)
            endpoint.listen(COORDINATOR)
            answer, transfers, marks = Answer(int(reply[0])), [sent], np.zeros(0, np.uint8)
            if answer == Answer.ROUND:
                marks = np.zeros(self._comm.size, np.uint8)
                transfers.append(endpoint.receive(COORDINATOR, marks))
            endpoint.finish(transfers, "the ranks of an outer step")
        if answer == Answer.GONE:
            raise UserError(
                f"rank {self._comm.world_ranks[int(reply[1])]} has finished its program, but rank "
                f"{self._comm.world_ranks[self._comm.rank]} waits for an outer step: call "
                "learner.finish() on all ranks"
            )
        return answer, np.flatnonzero(marks).tolist()

    def _answer(self) -> Header | None:
        arrived = self._endpoint.arrivals()
        if self._task is not None and self._task.done and not arrived:
            # bounded: the task has ended; raises its error
            self._task.result()
        return arrived[0][1] if arrived else None

    def subset(self, members: Sequence[int]) -> Communicator:
        """Return a communicator of some ranks. Local."""
        if len(members) == self._comm.size:
            return self._comm
        return Subset(self._exchanging, members)

    def count(self, age: int) -> None:
        """Count a round of this rank.

        Args:
            age: number of outer steps missing in this rank's model.
        """
        self.taken += 1
        self.late += age > 0
        self.oldest = max(self.oldest, age)

    def catch_up(self, ranks: Sequence[int], steps: Sequence[int], arrays: Sequence[Array]) -> int:
        """Copy the newest arrays to the ranks with older ones. Collective among these ranks.

        Args:
            ranks: all ranks that call.
            steps: the outer steps in each rank's arrays.
            arrays: of this rank; changed if older.
        Returns:
            The outer steps in the newest arrays.
        """
        newest = max(steps)
        behind = [rank for rank, own in zip(ranks, steps, strict=True) if own < newest]
        giver = ranks[steps.index(newest)]
        if behind and self._comm.rank in (giver, *behind):
            subset = Subset(self._exchanging, [giver, *behind])
            for array in arrays:
                subset.broadcast(array)
                self._bytes_sent += array.nbytes * len(behind) * (self._comm.rank == giver)
        return newest

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    def report(self) -> dict[str, dict[str, int]]:
        counts = {"taken": self.taken, "late": self.late, "oldest": self.oldest}
        return {"outer_steps": counts}

    def close(self, *, failed: bool = False) -> None:
        if self._task is not None:
            self._task.end()
        self._endpoint.close()
        if not failed:
            self._coordination.close()
            self._exchanging.close()
