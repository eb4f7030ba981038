"""Checkpoints of a session: decide when to save, and resume a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import SharedError, UserError
from ..checkpoint.config import SharedClock
from ..checkpoint.files import checkpoints_in, read_manifest, remove, set_aside_after, sort_key
from ..checkpoint.latest import checkpoint_to_resume
from ..checkpoint.loader import load_checkpoint
from ..checkpoint.saver import Checkpoints, folder_difference, paths_of
from ..learner import Learner
from .best_model import BestModel
from .minibatches import SessionMinibatches
from .options import SessionOptions
from .state import SessionState


class SessionCheckpoints:
    """Saves and resumes a session.

    Args:
        session: the checked options, with `checkpoints`.
        learner: the session's learner.
        minibatches: the session's minibatches.
        facts: values that must be equal when the run is resumed, by name.

    Creation is collective. Use it in a `with` block, like `Checkpoints`.
    """

    def __init__(
        self,
        session: SessionOptions,
        learner: Learner,
        minibatches: SessionMinibatches,
        facts: dict[str, Any],
    ) -> None:
        config = session.checkpoints
        assert config is not None
        self._config, self._learner, self._minibatches, self._facts = (
            config,
            learner,
            minibatches,
            facts,
        )
        self._comm = learner.comm
        self._saver = self._comm.together(
            lambda: Checkpoints(config.folder, keep=config.keep, facts=facts)
        )
        places = self._comm.allgather_object(paths_of(self._saver.folder))
        if problem := folder_difference(places, self._comm):
            raise SharedError(problem)
        self._comm.together(lambda: self._saver.hold() if self._comm.rank == 0 else None)
        every_s = config.every_s
        self._clock = None if every_s is None else SharedClock(every_s, learner.gathered)

    def __enter__(self) -> SessionCheckpoints:
        self._saver.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._saver.__exit__(*error)

    def resume_from(self, best_model: BestModel) -> tuple[SessionState, Path | None]:
        """Restore the checkpoint to be resumed, if any, including its best model.

        Returns:
            The session's state, and the checkpoint or None.

        Collective.
        """
        config, learner, minibatches = self._config, self._learner, self._minibatches
        first = self._comm.rank == 0
        path = self._comm.together(lambda: checkpoint_to_resume(config) if first else None)
        path = self._comm.allgather_object(path)[0]
        if path is None:
            return SessionState(), None
        loaded = load_checkpoint(learner, path, facts=self._facts)
        state = SessionState.of(loaded.extras, self._comm.rank, self._comm.size)
        if state is None:
            raise SharedError(f"checkpoint {str(loaded.path)!r} is not of a training session")
        if learner.samples > minibatches.total:
            seen = -(-(learner.samples - minibatches.start) // minibatches.epoch)
            raise SharedError(
                f"epochs={minibatches.epochs} must be at least {seen}, the epochs that checkpoint "
                f"{str(loaded.path)!r} has seen"
            )
        if state.ended and state.total == minibatches.total:
            best_model.ended = state.ended
        if best_model.keeps_best and state.best is not None:
            best = self._comm.together(lambda: _best_checkpoint(loaded.path.resolve(), state))
            load_checkpoint(learner, best, facts=self._facts)
            best_model.keep()
            load_checkpoint(learner, loaded.path, facts=self._facts)
        return state, loaded.path

    def set_aside_newer(self, resumed: Path | None) -> None:
        """Rename checkpoints newer than the resumed checkpoint. Local, for one rank."""
        resumed = resumed and resumed.resolve()
        if resumed and resumed.parent == Path(self._config.folder).resolve():
            set_aside_after(resumed)

    def due(self, before: int) -> bool:
        """Return whether a checkpoint is due after a step.

        Args:
            before: samples seen before the step.

        Collective when the ranks compare times.
        """
        due = self._config.every is not None and self._minibatches.crossed(
            before, self._config.every
        )
        return (self._clock is not None and self._clock.stepped()) or due

    def save(self, state: SessionState, *, best: bool) -> None:
        """Save all state, and the session's state. Collective.

        Args:
            best: whether the model is the best so far.
        """
        extra = state.as_dict(history=self._comm.rank == 0)  # one copy is enough
        with self._learner.timer.outside_training("checkpoint"):
            self._saver.save(self._learner, extra=extra, metric=state.best if best else None)

    def has(self, criterion: float | None) -> bool:
        """Return whether the model with this criterion is on the disk. Collective."""
        found = self._comm.rank == 0 and _with_criterion(self._saver.folder, criterion) is not None
        return any(self._comm.allgather_object(found))

    def wait(self) -> None:
        """Wait until all checkpoints are on the disk. Collective."""
        self._saver.wait()

    def remove_newer(self, samples: int) -> None:
        """Remove checkpoints with more samples: their training has been abandoned.

        The newest checkpoint then belongs to the training that continues. Local, for a single rank,
        after all ranks have waited.
        """
        for path in checkpoints_in(self._saver.folder):
            if sort_key(path.name)[0] > samples:
                remove(path)


def _best_checkpoint(resumed: Path, state: SessionState) -> Path:
    """Return the checkpoint with the best criterion, in the resumed checkpoint's folder. Local."""
    best = _with_criterion(resumed.parent, state.best)
    if best is not None:
        return best
    raise UserError(
        f"checkpoint {str(resumed)!r} cannot be resumed: the best checkpoint, of "
        f"{state.best_samples} samples, is not in the same folder"
    )


def _with_criterion(folder: Path, criterion: float | None) -> Path | None:
    """Return the checkpoint with a criterion, or None. Local."""
    for path in checkpoints_in(folder):
        with suppress(UserError):  # skip damaged checkpoints
            if read_manifest(path)["metric"] == criterion:
                return path
    return None
