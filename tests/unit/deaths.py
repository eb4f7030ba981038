"""Ranks that die at chosen places, as threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import parallel_sgd as psgd
from parallel_sgd.communication.threads.communicator import SimulatedFailure, ThreadWorld
from parallel_sgd.communication.threads.endpoint import Mailbox


class KilledAfter:
    """Kills a rank as all have come through its so many-th meeting with the others, of which one of
    them hears that a rank has died in it. (MPI may tell some ranks so, and others not.)"""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, number: int, other: int) -> None:
        self.killed, left = False, number
        meetings: Counter[tuple[ThreadWorld, str]] = Counter()
        meet, at = ThreadWorld.meet, None

        def counted(world: ThreadWorld, place: int, name: str, problem: str | None) -> None:
            nonlocal left, at
            thread = threading.current_thread().name
            meetings[world, thread] += 1
            here = world, meetings[world, thread]
            if thread == f"rank {rank}":
                left -= 1
                at = here if left == 0 else at
            meet(world, place, name, problem)
            if at == here and thread == f"rank {rank}":
                self.killed = True
                raise SimulatedFailure
            if at == here and thread == f"rank {other}":
                raise psgd.RanksLost("a rank has died")

        monkeypatch.setattr(ThreadWorld, "meet", counted)


class KilledAtMessage:
    """Kills a rank as its main thread sends or takes its so many-th message, or comes so often to a
    step or a meeting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, number: int) -> None:
        self._name, self._left, self.killed = f"rank {rank}", number, False
        for kind, name in (
            (Mailbox, "put"),
            (Mailbox, "take"),
            (ThreadWorld, "meet"),
            (psgd.Learner, "step"),
        ):
            monkeypatch.setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        takes = function is Mailbox.take

        def counted(*arguments: Any, **given: Any) -> Any:
            result = function(*arguments, **given) if takes else None
            if threading.current_thread().name == self._name and not (takes and result is None):
                self._left -= 1
                if self._left == 0:
                    self.killed = True
                    raise SimulatedFailure
            return result if takes else function(*arguments, **given)

        return counted
