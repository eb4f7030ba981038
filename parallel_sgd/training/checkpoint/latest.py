"""Choose the checkpoint to resume, also after an automatic restart of the job.

A failed job is restarted by the same command (`parallel-sgd run --restarts`), or by the batch
system (`--requeue`). The restarted job resumes the newest whole checkpoint written by the same job,
identified by the job's name in the manifest. An earlier checkpoint replaces a damaged checkpoint.
Clock times and checkpoints of other jobs in the folder do not matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...communication.job_environment import job_name, restarts
from ...communication.liveness.abort import print_labelled
from ...errors import UserError
from ...files import writing
from ...validation import checked_path, mapping
from ..learner import Learner, require_learner
from .config import CheckpointConfig
from .files import NAME, checkpoints_in, read_manifest, require_whole, set_aside_after
from .folder_lock import FolderLock
from .loader import LoadedCheckpoint, folder_of, load_checkpoint


def checkpoint_to_resume(config: CheckpointConfig) -> Path | None:
    """Return the checkpoint for a session to resume, or None for a new run.

    Local, for one rank, which prints the choice after a restart.

    Cost: after a restart, one read of the files of all ranks.
    """
    of_this_job, given = _newest_of_this_job(Path(config.folder)), config.to_resume
    if of_this_job is not None or given is None or not restarts() or not given.is_dir():
        return of_this_job or given
    if NAME.fullmatch(given.name):  # one checkpoint
        return given
    whole = newest_whole(folder_of(given))  # of any job: this job has no whole one
    return given if whole is None and config.resume is not True else whole


def resume(
    learner: Learner, folder: str | os.PathLike[str], *, facts: Mapping[str, Any] | None = None
) -> LoadedCheckpoint | None:
    """Restore the newest checkpoint in a folder, if any: for the beginning of your own loop.

    In a restarted job (`parallel-sgd run --restarts`, `--requeue`) the newest whole checkpoint
    written by this job is preferred. Newer checkpoints are renamed (``.aside``). A rank that joins
    as a replacement restores nothing, since it receives the state of the running ranks. A rank that
    only serves restores nothing.

    Args:
        learner: as for `load_checkpoint`.
        folder: the folder of checkpoints.
        facts: as for `load_checkpoint`.
    Returns:
        The result of `load_checkpoint`, or None if nothing was restored.
    Raises:
        UserError: as `load_checkpoint`.

    Collective. Cost: that of `load_checkpoint`. After a restart rank 0 also reads the files of all
    ranks.
    """
    require_learner(learner)
    if learner.serves or learner.recovery.has_joined:
        return None

    def resume_from() -> LoadedCheckpoint | None:
        comm = learner.comm
        place, _ = comm.together(lambda: (checked_path("folder", folder), mapping("facts", facts)))
        path = comm.together(lambda: _newest(place) if comm.rank == 0 else None)
        path = comm.allgather_object(path)[0]
        return None if path is None else load_checkpoint(learner, path, facts=facts)

    return learner.between_steps(resume_from)


def _newest(folder: Path) -> Path | None:
    lock = FolderLock("folder", folder)
    lock.hold(make=False, writes=False)  # not while another job saves here
    try:
        return _newest_in(folder)
    finally:
        lock.release()


def _newest_in(folder: Path) -> Path | None:
    if not restarts():
        return next(reversed(checkpoints_in(folder)), None)
    path = _newest_of_this_job(folder) or newest_whole(folder)
    if path is not None:
        with writing("folder", folder):
            set_aside_after(path)
    return path


def _newest_of_this_job(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of this job after a restart, and print the choice."""
    number = restarts()
    if not number:
        return None
    path = newest_whole(folder, lambda job: job == job_name())
    action = (
        f"starts from the beginning: the job has no whole checkpoint in {str(folder)!r}"
        if path is None
        else f"continues from checkpoint {str(path)!r}"
    )
    print_labelled(f"parallel-sgd: restart {number} {action}")
    return path


def newest_whole(
    folder: Path, wanted: Callable[[str | None], bool] = lambda job: True
) -> Path | None:
    """Return the newest undamaged checkpoint in a folder.

    Args:
        wanted: given the name of the writing job, returns whether its checkpoints count.
    """
    for path in reversed(checkpoints_in(folder)):
        try:
            if not wanted(read_manifest(path).get("job")):
                continue
            require_whole(path)
        except UserError as error:
            print_labelled(f"parallel-sgd: skipped: {error}")
            continue
        return path
    return None
