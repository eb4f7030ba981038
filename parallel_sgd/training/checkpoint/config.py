"""Options of a session's checkpoints: the folder, the interval, and the checkpoint to resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ... import runtime
from ...errors import UserError
from ...validation import checked_path, integer, number, set_validated, shown
from .files import checkpoints_in
from .retention import KEEP


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a session: the latest, the best, and the last.

    Args:
        folder: the folder of checkpoints, the same on all ranks, on a file system that all ranks
            share.
        every: samples of all ranks between two checkpoints. None: see `every_s`.
        every_s: seconds between two checkpoints, approximately. Without `every` and `every_s`, only
            the best model and the final state are saved.
        keep: number of latest checkpoints to keep, in addition to the best.
        resume: a checkpoint to resume, or a folder of checkpoints or of a run, whose newest
            checkpoint is resumed. True: the newest checkpoint in `folder`, if any, for jobs started
            again by the same command. A job restarted by `parallel-sgd run --restarts` needs no
            `resume`: it resumes the newest whole checkpoint in `folder` written by this job.
    Raises:
        UserError: an argument is not as required.

    Local.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    every_s: float | None = None
    keep: int = KEEP
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
        """The values that must be equal on all ranks, without the folder.

        Ranks may name the same folder by different paths: see `folder_difference`. Local.
        """
        return (self.every, self.every_s, self.keep, self.resume)

    @property
    def to_resume(self) -> Path | None:
        """The checkpoint or folder to resume, or None for a new run. Local."""
        if isinstance(self.resume, str):
            return Path(self.resume)
        folder = Path(self.folder)
        return folder if self.resume and folder.is_dir() and checkpoints_in(folder) else None


class SharedClock:
    """A timer that expires on all ranks after the same step.

    The ranks compare their times only now and then: after half of the steps left at the pace so
    far.

    Args:
        seconds: the interval between two expirations.
        gathered: gathers one number from each rank, on all ranks (`Learner.gathered`). Collective.
        now: this rank's clock, in seconds.
    """

    def __init__(
        self,
        seconds: float,
        gathered: Callable[[float], list[float]],
        now: Callable[[], float] = runtime.perf_counter,
    ) -> None:
        self._seconds, self._gathered, self._now = seconds, gathered, now
        self._restart()

    def _restart(self) -> None:
        self._since, self._steps, self._ask_at = self._now(), 0, 1

    def stepped(self) -> bool:
        """Count a step. Return whether the interval has passed.

        Collective when the ranks compare times.
        """
        self._steps += 1
        if self._steps < self._ask_at:
            return False
        passed = max(self._gathered(self._now() - self._since))
        if passed >= self._seconds:
            self._restart()
            return True
        remaining = (self._seconds - passed) * self._steps / max(passed, 1e-9)
        self._ask_at = self._steps + max(1, int(min(remaining / 2, 1e9)))
        return False
