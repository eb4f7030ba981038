"""Ranks that die at chosen places, as threads."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

import parallel_sgd as psgd
from parallel_sgd.communication.threads import Dies, ThreadWorld


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
                raise Dies
            if at == here and thread == f"rank {other}":
                raise psgd.RanksLost("a rank has died")

        monkeypatch.setattr(ThreadWorld, "meet", counted)
