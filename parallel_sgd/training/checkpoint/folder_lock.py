"""One process at a time writes to a folder: the lock of a run's folder, and of one of checkpoints.

The lock is the kernel's, on the file ``.lock`` in the folder, so that the end of the process frees
it, however it ends; what the file says is only told to others. It is one of POSIX's kind, which
hold between the hosts that share a disk (NFS). The kernel of Linux binds it to the open file: there
a process that opens the file again, as to copy the folder, does not free it. A child that is forked
closes what it has inherited. Where the file system knows no locks, nobody is kept out.

A process frees the lock, and removes the file, when the last of its holds is given back. An object
that writes has one until it is closed or collected, or the program's exit handlers run. A write in
the background has one of its own (`FolderLock.hold_again`) until its end, whatever comes before.
Everything here is local.
"""

from __future__ import annotations

import atexit
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...communication.job_environment import FOLDER, fault_tolerant, job_name, restarts
from ...errors import UserError
from ...files import writing

LOCK = ".lock"

#: A process that is being ended frees its lock within so long.
_FREED_S = 3.0

_RETRY_S = 0.05

#: What a file system says that has no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

_NOT_HERE = {errno.EACCES, errno.EPERM, errno.EROFS}  #: no file can be made or written

#: As struct flock: kind, counted from the file's begin (0), from byte 0 to its end, no process.
_WHOLE = struct.Struct("hhqqi0q")


@dataclass(eq=False, slots=True)
class _Held:
    """A lock that this process has, for all its holds. (Other systems than Linux free a lock when
    any descriptor of the file is closed, so each file is open once.)"""

    place: Path
    descriptor: int
    holds: int = 0


_held: dict[Path, _Held] = {}  #: of this process, by folder
_registry_lock = threading.RLock()  # an object may go while its thread has it


class FolderLock:
    """What keeps other processes from writing to a folder, from `hold` to `release`.

    Args:
        name: of the argument that says the folder, for errors.
        folder: which.

    Several of one process do not keep each other out. A `with` block holds it. It is released at
    the latest when the object is collected, or the program's exit handlers run.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._held: _Held | None = None

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
        if self._current() or not (make or self._folder.is_dir()):
            return
        with writing(self._name, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            place = self._folder.resolve()
            with _registry_lock:
                held = _held.get(place)
                if held is None:
                    try:
                        held = _held[place] = _Held(place, self._acquire(place / LOCK))
                    except OSError as error:
                        if writes or error.errno not in _NOT_HERE:
                            raise
                        return
                held.holds += 1
                self._held = held
                _until_exit.add(self)

    def hold_again(self) -> FolderLock:
        """Hold it once more, for a write in the background, which the program waits for at its end:
        the exit handlers do not release what is returned. Holds nothing where this object does not.
        """
        other = FolderLock(self._name, self._folder)
        with _registry_lock:
            if held := self._current():
                held.holds += 1
                other._held = held
        return other

    def release(self) -> None:
        """Give it back; nothing, where this object does not have it."""
        if self._held is None:
            return
        with _registry_lock:
            held, self._held = self._current(), None
            if held is None:
                return
            held.holds -= 1
            if held.holds:
                return
            del _held[held.place]
            with suppress(OSError):  # the folder is gone, or must not be written to any more
                if _still_names(held.place / LOCK, held.descriptor):
                    (held.place / LOCK).unlink()
            os.close(held.descriptor)

    __del__ = release

    def _current(self) -> _Held | None:
        """The lock, if this object has it: a child that was forked has none of its parent's."""
        held = self._held
        return held if held is not None and _held.get(held.place) is held else None

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _acquire(self, path: Path) -> int:
        """The descriptor of the file that is locked."""
        deadline = time.monotonic() + _FREED_S
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o666)
            try:
                if not _is_locked(descriptor):
                    if time.monotonic() > deadline:
                        holder = _read_holder(descriptor)
                        if not (_is_of_earlier_start(holder) or _is_of_lost_host(holder)):
                            raise UserError(self._in_use(path, holder))
                        if _still_names(path, descriptor):  # and not yet removed by another rank
                            path.unlink(missing_ok=True)  # a lost host may hold it for ever
                elif _still_names(path, descriptor):
                    kept, descriptor = descriptor, -1
                    _write_holder(kept)
                    return kept
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            time.sleep(_RETRY_S)

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


def _still_names(path: Path, descriptor: int) -> bool:
    """Whether a file has this name: who had it may have removed it meanwhile."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _write_holder(descriptor: int) -> None:
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


def _read_holder(descriptor: int) -> dict[str, Any]:
    """What the holder of a lock has written; nothing where it is about to."""
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_of_earlier_start(holder: dict[str, Any]) -> bool:
    """Whether a lock is of an earlier start of this job: its launcher has seen to its end."""
    job, start = job_name(), holder.get("restart")
    return job is not None and holder.get("job") == job and start in range(restarts())


def _is_of_lost_host(holder: dict[str, Any]) -> bool:
    """Whether a lock is of a rank whose place this one has taken, as the job's writer, and whose
    host is lost: on this host the kernel would have freed it."""
    launch, host = os.environ.get(FOLDER), holder.get("host")
    same = launch is not None and holder.get("launch") == launch
    return fault_tolerant() and same and host not in (None, socket.gethostname())


_until_exit: weakref.WeakSet[FolderLock] = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """Before the program waits for what it writes in the background: that may end the process."""
    with _registry_lock:
        for lock in [*_until_exit]:
            lock.release()


def _reset_in_child() -> None:
    global _registry_lock
    _registry_lock = threading.RLock()  # another thread may have had it
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_reset_in_child)
