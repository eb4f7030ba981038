"""Where a session saves its checkpoints, and how often."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import UserError
from ...validation import checked_path, integer, number, set_validated, shown
from .files import checkpoints_in


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a session: the latest ones, the best one, and the last one.

    Args:
        folder: the same on all ranks, which all share.
        every: so many samples of all ranks lie between two checkpoints; None: see `every_s`.
        every_s: about so many seconds lie between two. Where neither is given, there are those of
            the best model and of the end alone.
        keep: how many of the latest to keep, beside the best one.
        resume: a checkpoint to go on from, or the folder of checkpoints or of a run, whose newest
            is taken; True: the newest in `folder`, if there is one: for jobs that are started again
            by the same command. One that `parallel-sgd run --restarts` starts again needs none: it
            goes on from the newest whole checkpoint in `folder` that it has written.
    Raises:
        UserError: an argument is not as required.

    Local.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    every_s: float | None = None
    keep: int = 3
    resume: str | os.PathLike[str] | bool | None = None

    def __post_init__(self) -> None:
        resume = self.resume
        if not isinstance(resume, bool | None):
            resume = str(checked_path("resume", resume))
        every_s = None if self.every_s is None else number("every_s", self.every_s, 0)
        if every_s == 0:
            raise UserError(f"every_s={shown(self.every_s)} must be more than 0 seconds")
        set_validated(
            self,
            folder=str(checked_path("folder", self.folder)),
            every=None if self.every is None else integer("every", self.every, 1),
            every_s=every_s,
            keep=integer("keep", self.keep, 1),
            resume=resume,
        )

    @property
    def facts(self) -> tuple[object, ...]:
        """What must be the same on all ranks, beside the folder. Ranks may call the folder by
        different names of the same place: see `folder_difference`. Local."""
        return (self.every, self.every_s, self.keep, self.resume)

    @property
    def to_resume(self) -> Path | None:
        """What to go on from; None: from the beginning. Local."""
        if isinstance(self.resume, str):
            return Path(self.resume)
        folder = Path(self.folder)
        return folder if self.resume and folder.is_dir() and checkpoints_in(folder) else None


class SharedClock:
    """Tells all ranks at the same step that some seconds have passed.

    The ranks ask each other only now and then: after half of the steps that, by the pace so far,
    are left.

    Args:
        seconds: between two times that it tells so.
        gathered: what each rank gives to it, on all ranks (`Learner.gathered`).
    """

    def __init__(self, seconds: float, gathered: Callable[[float], list[float]]) -> None:
        self._seconds, self._gathered = seconds, gathered
        self._restart()

    def _restart(self) -> None:
        self._since, self._steps, self._ask_at = time.perf_counter(), 0, 1

    def stepped(self) -> bool:
        """Whether the seconds have passed, after one more step. Collective where ranks ask."""
        self._steps += 1
        if self._steps < self._ask_at:
            return False
        passed = max(self._gathered(time.perf_counter() - self._since))
        if passed >= self._seconds:
            self._restart()
            return True
        left = (self._seconds - passed) * self._steps / max(passed, 1e-9)
        self._ask_at = self._steps + max(1, int(min(left / 2, 1e9)))
        return False
