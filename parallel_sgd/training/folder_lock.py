"""One process at a time writes to a folder: the lock of a run's folder, and of one of checkpoints.

The lock is the kernel's, on the file ``.lock`` in the folder, so that the end of the process frees
it, however it ends; what the file says is only told to others. It is one of POSIX's kind, which
hold between the hosts that share a disk (NFS). The kernel of Linux binds it to the open file: there
a process that opens the file again, as to copy the folder, does not free it. A child that is forked
closes what it has inherited. Where the file system knows no locks, nobody is kept out. Everything
here is local.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ..communication.launched import FOLDER, job_name, restarts, survives
from ..errors import UserError
from ..files import writing

LOCK = ".lock"

#: A process that is being ended frees its lock within so long.
_FREED_S = 3.0

_LOOKS_EVERY_S = 0.05

#: What a file system says that has no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

_NOT_HERE = {errno.EACCES, errno.EPERM, errno.EROFS}  #: no file can be made or written

#: As struct flock: kind, counted from the file's begin (0), from byte 0 to its end, no process.
_WHOLE = struct.Struct("hhqqi0q")

#: Of this process: descriptor and number of users, by folder. (Other systems than Linux free a lock
#: when any descriptor of the file is closed, so each file is open once.)
_held: dict[Path, list[int]] = {}
_noting = threading.RLock()  # an object may go while its thread has it


class FolderLock:
    """What keeps other processes from writing to a folder, from `hold` to `release`.

    Args:
        name: of the argument that says the folder, for errors.
        folder: which.

    Several of one process do not keep each other out. A `with` block holds it.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._gives_back: weakref.finalize[[Path], FolderLock] | None = None

    def hold(self, *, make: bool = True, writes: bool = True) -> None:
        """Take the lock, unless this object has it.

        Args:
            make: make the folder, if there is none; else there is nothing to hold then.
            writes: this process is going to write; else there is nothing to hold in a folder that
                it cannot write to.
        Raises:
            UserError: another process has it, and does not free it within `_FREED_S`; says which.
                One of an earlier start of this job has been ended, and is not asked; nor is one
                on another host of this start, where ranks survive each other: of a job that has
                one writer that host is lost.
        """
        if self._gives_back is not None or not (make or self._folder.is_dir()):
            return
        with writing(self._name, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            place = self._folder.resolve()
            with _noting:
                if place not in _held:
                    try:
                        _held[place] = [self._taken(place / LOCK), 0]
                    except OSError as error:
                        if writes or error.errno not in _NOT_HERE:
                            raise
                        return
                _held[place][1] += 1
        self._gives_back = weakref.finalize(self, _give_back, place)  # also as the program ends

    def release(self) -> None:
        """Give it back; nothing, where this object does not have it."""
        gives_back, self._gives_back = self._gives_back, None
        if gives_back is not None:
            gives_back()

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _taken(self, path: Path) -> int:
        """The descriptor of the file that is locked."""
        deadline = time.monotonic() + _FREED_S
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o666)
            try:
                if not _is_locked(descriptor):
                    if time.monotonic() > deadline:
                        holder = _told(descriptor)
                        if not (_was_this_job(holder) or _is_lost(holder)):
                            raise UserError(self._in_use(path, holder))
                        if _is_still(path, descriptor):  # and not yet removed by another rank
                            path.unlink(missing_ok=True)  # a lost host may hold it for ever
                elif _is_still(path, descriptor):
                    kept, descriptor = descriptor, -1
                    _tell(kept)
                    return kept
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            time.sleep(_LOOKS_EVERY_S)

    def _in_use(self, path: Path, holder: dict[str, Any]) -> str:
        who = f"process {holder.get('process', '?')} on host {holder.get('host', '?')}"
        return (
            f"{self._name}={str(self._folder)!r} is in use: {who} writes to it, since "
            f"{holder.get('since', '?')}. Wait for its end, or take another folder (only where "
            f"that host is lost: remove {str(path)!r})"
        )


def _is_locked(descriptor: int) -> bool:
    """Lock a file; whether no other process has done so."""
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):  # the kernel of Linux
            lock = _WHOLE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        else:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether a file has this name: who had it may have removed it meanwhile."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _tell(descriptor: int) -> None:
    """Write who holds a lock."""
    facts = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": job_name(),
        "restart": restarts(),
        "launch": os.environ.get(FOLDER),
    }
    with suppress(OSError):  # a full disk, say
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)


def _told(descriptor: int) -> dict[str, Any]:
    """What the holder of a lock has written; nothing where it is about to."""
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _was_this_job(holder: dict[str, Any]) -> bool:
    """Whether a lock is of an earlier start of this job: its launcher has seen to its end."""
    job, start = job_name(), holder.get("restart")
    return job is not None and holder.get("job") == job and start in range(restarts())


def _is_lost(holder: dict[str, Any]) -> bool:
    """Whether a lock is of a rank whose place this one has taken, as the job's writer, and whose
    host is lost: on this host the kernel would have freed it."""
    launch, host = os.environ.get(FOLDER), holder.get("host")
    same = launch is not None and holder.get("launch") == launch
    return survives() and same and host not in (None, socket.gethostname())


def _give_back(place: Path) -> None:
    """One user less; the last one frees the lock."""
    with _noting:
        if place not in _held:  # a child that was forked has none
            return
        _held[place][1] -= 1
        if _held[place][1] > 0:
            return
        descriptor, _ = _held.pop(place)
        with suppress(OSError):  # the folder is gone, or must not be written to any more
            if _is_still(place / LOCK, descriptor):
                (place / LOCK).unlink()
        os.close(descriptor)


def _hold_nothing() -> None:
    global _noting
    _noting = threading.RLock()  # another thread may have had it
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_hold_nothing)
