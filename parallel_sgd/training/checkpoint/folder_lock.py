"""Lock a folder of a run or of checkpoints: a single process writes at a time.

The lock is a kernel lock on the file ``.lock`` in the folder. So the end of the process frees the
lock, however the process ends. The file's content only informs other processes. The lock is a POSIX
lock, valid between hosts that share a disk (NFS). On Linux the lock is bound to the open file
description: opening the file again in the same process, as a copy of the folder does, does not free
the lock. A forked child closes inherited lock files. On a file system without locks, no process is
kept out.

A process frees the lock and removes the file when its last hold is released. A writing object has a
hold until it is closed or collected, or until the program's exit handlers run. A background write
has its own hold (`FolderLock.hold_again`) until its end, regardless of the exit handlers.
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

from ... import runtime
from ...communication.job_environment import FOLDER, fault_tolerant, job_name, restarts
from ...errors import UserError
from ...files import writing

LOCK = ".lock"

#: Longest time for an ending process to free its lock.
_FREED_S = 3.0

_RETRY_S = 0.05

#: Error codes of file systems without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

_NOT_HERE = {errno.EACCES, errno.EPERM, errno.EROFS}  #: error codes of a read-only folder

#: struct flock: kind, whence (0: the file's begin), start 0, length 0 (to the end), no process.
_WHOLE = struct.Struct("hhqqi0q")


@dataclass(eq=False, slots=True)
class _Held:
    """A lock of this process, shared by all its holds.

    Outside Linux, closing any descriptor of the file frees the lock, so each file is opened once.
    """

    place: Path
    descriptor: int
    holds: int = 0


_held: dict[Path, _Held] = {}  #: locks of this process, by folder
_registry_lock = threading.RLock()  # reentrant: `__del__` may run while its thread holds it


class FolderLock:
    """Keeps other processes from writing to a folder, from `hold` to `release`.

    Several locks of one process do not exclude each other. A `with` block holds the lock. The lock
    is released at the latest when the object is collected, or when the program's exit handlers run.

    Args:
        name: the argument that named the folder, for errors.
        folder: the folder to lock.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._folder = name, folder
        self._held: _Held | None = None

    def hold(self, *, make: bool = True, writes: bool = True) -> None:
        """Take the lock, unless this object already holds it.

        Args:
            make: make a missing folder. False: hold nothing if the folder is missing.
            writes: this process is going to write. False: hold nothing in a read-only folder.
        Raises:
            UserError: another process holds the lock and does not free it within `_FREED_S`. The
                error names the process. Two kinds of holders are ignored after that time: an
                earlier start of this job, already ended by its launcher; and, in a fault-tolerant
                job, a process of the same start on another host. Such a job has a single writer, so
                that host is lost.
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
        """Take a second hold for a background write. The program waits for that write at its end.

        The exit handlers do not release the returned lock. Without a hold of this object, the
        returned lock holds nothing.
        """
        other = FolderLock(self._name, self._folder)
        with _registry_lock:
            if held := self._current():
                held.holds += 1
                other._held = held
        return other

    def release(self) -> None:
        """Release the lock, if this object holds it."""
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
            with suppress(OSError):  # the folder was removed, or is now read-only
                if _still_names(held.place / LOCK, held.descriptor):
                    (held.place / LOCK).unlink()
            os.close(held.descriptor)

    __del__ = release

    def _current(self) -> _Held | None:
        """Return the lock if this object holds it. A forked child holds no lock of its parent."""
        held = self._held
        return held if held is not None and _held.get(held.place) is held else None

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _acquire(self, path: Path) -> int:
        """Lock the file and return its descriptor. Retries until `_FREED_S` have passed."""
        deadline = runtime.monotonic() + _FREED_S
        # bounded: has a deadline in its body
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o666)
            try:
                if not _is_locked(descriptor):
                    if runtime.monotonic() > deadline:
                        holder = _read_holder(descriptor)
                        if not (_is_of_earlier_start(holder) or _is_of_lost_host(holder)):
                            raise UserError(self._in_use(path, holder))
                        if _still_names(path, descriptor):  # not yet removed by another rank
                            path.unlink(missing_ok=True)  # a lost host may hold the lock for ever
                elif _still_names(path, descriptor):
                    kept, descriptor = descriptor, -1
                    _write_holder(kept)
                    return kept
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            runtime.sleep(_RETRY_S)

    def _in_use(self, path: Path, holder: dict[str, Any]) -> str:
        who = f"process {holder.get('process', '?')} on host {holder.get('host', '?')}"
        return (
            f"{self._name}={str(self._folder)!r} is in use: {who} has been writing there since "
            f"{holder.get('since', '?')}. Wait for this process to end, or use another folder "
            f"(only if that host has failed: remove {str(path)!r})"
        )


def _is_locked(descriptor: int) -> bool:
    """Try to lock a file. Return whether this process now has the lock.

    True also on a file system without locks.
    """
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):  # Linux
            lock = _WHOLE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        else:
            # bounded: LOCK_NB
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _still_names(path: Path, descriptor: int) -> bool:
    """Return whether the path still names the open file, or an earlier holder has removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _write_holder(descriptor: int) -> None:
    """Write the holder of a lock into its file."""
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
    """Read the holder of a lock. Empty if the holder has not written it yet."""
    try:
        facts = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_of_earlier_start(holder: dict[str, Any]) -> bool:
    """Return whether the holder is an earlier start of this job, already ended by its launcher."""
    job, start = job_name(), holder.get("restart")
    return job is not None and holder.get("job") == job and start in range(restarts())


def _is_of_lost_host(holder: dict[str, Any]) -> bool:
    """Return whether the holder is a former writer of this job on a lost host.

    This rank has replaced that writer. A lock held on this host would have been freed by the
    kernel.
    """
    launch, host = os.environ.get(FOLDER), holder.get("host")
    same = launch is not None and holder.get("launch") == launch
    return fault_tolerant() and same and host not in (None, socket.gethostname())


_until_exit: weakref.WeakSet[FolderLock] = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """Release locks before the wait for background writes, as that wait may end the process."""
    with _registry_lock:
        for lock in [*_until_exit]:
            lock.release()


def _reset_in_child() -> None:
    """Close the lock files inherited by a forked child, and forget all locks."""
    global _registry_lock
    _registry_lock = threading.RLock()  # a thread of the parent may have held it
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_reset_in_child)
