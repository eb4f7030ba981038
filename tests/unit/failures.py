"""Planned failures of ranks that are threads: which rank fails, and where."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

import pytest

import parallel_sgd as psgd
from parallel_sgd.communication import Mailbox, SimulatedFailure, ThreadWorld

Meeting = tuple[ThreadWorld, int]  #: a world, and the count of a rank's meetings in it


class Failure:
    """One failure of a rank, at one place of its main thread. Every count starts at 1.

    Args:
        rank: world rank.
        meeting: fail on entering this meeting of the rank, in any world.
        heard_by: fail after that meeting instead, completed by all ranks. This rank alone gets an
            error in the meeting (MPI may report a failure to some ranks only).
        message: fail at this call of `Mailbox.put`, `ThreadWorld.meet` or `Learner.step`, or with
            this received message: all are counted together.
        step: fail on entering this step of the learner.

    Attributes:
        struck: the rank has failed.
    """

    def __init__(
        self,
        rank: int,
        *,
        meeting: int | None = None,
        heard_by: int | None = None,
        message: int | None = None,
        step: int | None = None,
    ) -> None:
        given = {"meeting": meeting, "message": message, "step": step}
        ((self._place, self._left),) = (item for item in given.items() if item[1] is not None)
        assert heard_by is None or self._place == "meeting"
        self._thread, self._heard_by, self.struck = f"rank {rank}", heard_by, False
        self._meeting: Meeting | None = None

    def come(self, kind: str, meeting: Meeting | None = None) -> None:
        """Count a place of the calling thread, and fail there."""
        if threading.current_thread().name != self._thread or self._place not in (kind, "message"):
            return
        self._left -= 1
        if self._left == 0 and self._heard_by is not None:
            self._meeting = meeting
        elif self._left == 0:
            self._strike()

    def leave(self, meeting: Meeting) -> None:
        """Fail after a completed meeting, or report the failure to the other rank."""
        if meeting != self._meeting:
            return
        name = threading.current_thread().name
        if name == self._thread:
            self._strike()
        if name == f"rank {self._heard_by}":
            raise psgd.RanksLost("a rank has died")

    def _strike(self) -> None:
        self.struck = True
        raise SimulatedFailure


Replacement = tuple[type[Any], str, Callable[..., Any]]


@contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Inside, methods of ranks are functions, which are called with the method itself first."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, function in replacements:
            right = getattr(owner, name)
            patch.setattr(owner, name, partialmethod(_called, function, right))
        yield


def _called(
    own: Any, function: Callable[..., Any], right: Callable[..., Any], *given: Any, **options: Any
) -> Any:
    return function(right, own, *given, **options)


class FailurePlan:
    """Context manager: inside, ranks fail as planned."""

    def __init__(self, *failures: Failure) -> None:
        self.failures = failures
        self._meetings: Counter[tuple[ThreadWorld, str]] = Counter()

    @property
    def struck(self) -> int:
        """The number of failures so far."""
        return sum(failure.struck for failure in self.failures)

    def __enter__(self) -> FailurePlan:
        def counted_meet(meet: Any, world: ThreadWorld, *arguments: Any) -> int:
            thread = threading.current_thread().name
            self._meetings[world, thread] += 1
            meeting = world, self._meetings[world, thread]
            for failure in self.failures:
                failure.come("meeting", meeting)
            number: int = meet(world, *arguments)
            for failure in self.failures:
                failure.leave(meeting)
            return number

        def counted_take(take: Any, mailbox: Mailbox, key: Any) -> Any:
            message = take(mailbox, key)
            if message is not None:
                self._come("taken")
            return message

        self._replaced = replaced(
            (ThreadWorld, "meet", counted_meet),
            (Mailbox, "take", counted_take),
            (Mailbox, "put", self._counted("put")),
            (psgd.Learner, "step", self._counted("step")),
        )
        self._replaced.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._replaced.__exit__(None, None, None)

    def _come(self, kind: str) -> None:
        for failure in self.failures:
            failure.come(kind)

    def _counted(self, kind: str) -> Callable[..., Any]:
        def counted(right: Any, *arguments: Any, **options: Any) -> Any:
            self._come(kind)
            return right(*arguments, **options)

        return counted
