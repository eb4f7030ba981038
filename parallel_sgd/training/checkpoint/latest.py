"""From which checkpoint a session goes on, also where its job was started again by itself.

A job that is lost is started again by the same command (`parallel-sgd run --restarts`), or by the
batch system (`--requeue`). It then goes on from the newest whole checkpoint that this job itself
has written, by the name of the job in its manifest; an earlier one takes the place of one that is
damaged. Neither the clock nor what other jobs have left in the folder matters.
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
    """What a session goes on from; None: it begins. Local, for one rank, which says so after a
    restart.

    Cost: after a restart reads a checkpoint of all ranks once.
    """
    own, given = _newest_of_this_job(Path(config.folder)), config.to_resume
    if own is not None or given is None or not restarts() or not given.is_dir():
        return own or given
    if NAME.fullmatch(given.name):  # one checkpoint
        return given
    whole = newest_whole(folder_of(given))  # the job's first one may be damaged, and its only one
    return given if whole is None and config.resume is not True else whole


def resume(
    learner: Learner, folder: str | os.PathLike[str], *, facts: Mapping[str, Any] | None = None
) -> LoadedCheckpoint | None:
    """Take up the newest checkpoint in a folder, where there is one: for the beginning of a loop of
    your own.

    In a job that was started again (`parallel-sgd run --restarts`, `--requeue`) that is the newest
    one that is whole and that the job itself has written, as far as there is one; newer ones are
    renamed (``.aside``). A rank that was in reserve and takes the place of another takes up
    nothing, since it has the state of the others; nor does one that only serves.

    Args:
        learner, facts: as for `load_checkpoint`.
        folder: of checkpoints.
    Returns:
        What `load_checkpoint` does; None where nothing was taken up.
    Raises:
        UserError: as `load_checkpoint`.

    Collective. Cost: that of `load_checkpoint`; after a restart one rank reads the files of all,
    too.
    """
    require_learner(learner)
    if learner.serves or (learner.recovery is not None and learner.recovery.has_joined):
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
    lock.hold(make=False, writes=False)  # what another job saves now is no place to go on from
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
    """The newest whole checkpoint of this job, if it was started again; says so."""
    number = restarts()
    if not number:
        return None
    path = newest_whole(folder, lambda job: job == job_name())
    goes_on = (
        f"begins as the job has begun: it has no whole checkpoint in {str(folder)!r}"
        if path is None
        else f"goes on from checkpoint {str(path)!r}"
    )
    print_labelled(f"parallel-sgd: restart {number} {goes_on}")
    return path


def newest_whole(
    folder: Path, wanted: Callable[[str | None], bool] = lambda job: True
) -> Path | None:
    """The newest checkpoint in a folder that is not damaged, of those that a wanted job has
    written, by its name."""
    for path in reversed(checkpoints_in(folder)):
        try:
            if not wanted(read_manifest(path).get("job")):
                continue
            require_whole(path)
        except UserError as error:
            print_labelled(f"parallel-sgd: passed over: {error}")
            continue
        return path
    return None
