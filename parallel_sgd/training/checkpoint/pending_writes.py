"""Background writes of checkpoints by the ranks of this process."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ... import runtime
from ...communication import InBackground
from ...errors import SharedProblem, UserError
from . import files

_pending_writes: defaultdict[Path, list[InBackground[Path]]] = defaultdict(list)
"""By folder, until their result was reported."""
_pending_lock = runtime.Lock()


def add_pending_write(folder: Path, writing: InBackground[Path]) -> None:
    """Add a write in a folder of checkpoints. Local."""
    with _pending_lock:
        known = _pending_writes[folder.resolve()]
        known[:] = [other for other in known if not other.done or other.failed] + [writing]


def remove_pending_write(writing: InBackground[Path]) -> None:
    """Remove a write with a reported result. Local."""
    with _pending_lock:
        for folder, known in list(_pending_writes.items()):
            known[:] = [other for other in known if other is not writing]
            if not known:
                del _pending_writes[folder]


def wait_for_pending_writes(path: Path) -> SharedProblem | None:
    """Wait for all background writes of this process that concern a path. Local.

    Args:
        path: a checkpoint, a folder of checkpoints, or a run's folder.
    Returns:
        The errors of these writes, if not yet reported.
    Raises:
        Exception: a write failed by an error other than `UserError`.
    """
    resolved = path.resolve()
    with _pending_lock:
        folders = (resolved, resolved.parent, resolved / files.CHECKPOINTS)
        concerned = [writing for folder in folders for writing in _pending_writes.get(folder, ())]
    problems: dict[str, None] = {}
    for writing in concerned:
        reported = writing.done and not writing.failed
        error = writing.error()
        remove_pending_write(writing)
        if reported:
            continue
        if isinstance(error, UserError):
            problems[str(error)] = None
        elif error is not None:
            raise error
    return SharedProblem("; ".join(problems)) if problems else None
