"""The launcher's folder, and what jobs leave on a host where their launcher, mpiexec or ranks are
killed: folders, MPI's shared memory and temporary files, and the sockets of Python's processes.

All of it is removed by the launcher, or by the next one on that host. Local.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path

from ..communication.job_environment import FOLDER, launched_rank

PREFIX, LOCK, MPIEXEC = "parallel_sgd-", "lock", "mpiexec"
"""Of the folder; in it the lock, and the number of mpiexec's process."""

#: Where MPIs have shared memory, and MPICH's mpiexec a file for the topology of the host, which is
#: open as long as it is used; and their names: nothing else is removed there.
_PLACES = {
    Path("/dev/shm"): re.compile(r"(mpich_shm|sm_segment\.|ucx_shm_posix_)[^/]*"),
    Path("/tmp"): re.compile(r"hydra_hwloc_xmlfile_\w{6}"),  # whatever TMPDIR is
}

#: Folders among temporary files in which Python's processes have sockets, as workers of a
#: DataLoader: these are there until their process ends by itself.
_SOCKETS = "pymp-*"

#: What is made in shared memory is mapped by its maker within so long.
_MAPPED_S = 0.05

#: Who looks at a file as this process does, to see whether it is in use, is done within so long.
_LOOKED_S = (0.005, 0.03)

#: Ranks whose mpiexec is gone end within so long; and a DataLoader's workers, which look every 5 s
#: whether their rank is there.
_ENDING_S = 6.0


def locked_folder(shared: Path | None = None) -> tuple[Path, int]:
    """A new folder, and the descriptor of the lock in it, which this process holds.

    Args:
        shared: where to make it, hidden; None: among temporary files.
    Raises:
        OSError: it cannot be made, or locked; then nothing stays behind.
    """
    prefix = PREFIX if shared is None else f".{PREFIX}"
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=shared))
    new, lock = folder / f"{LOCK}.new", -1
    try:
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which nobody else knows yet
        os.write(lock, os.fsencode(socket.gethostname()))
        new.rename(folder / LOCK)
    except OSError:
        if lock >= 0:
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def remove(folder: Path, lock: int, *, complete: bool) -> None:
    """Remove a launcher's folder, and what MPI has left elsewhere since it was made; and close its
    lock. Waits `_ENDING_S` at most for processes of the job: where mpiexec was killed, nobody has
    waited for those that had not yet signed on, and they may yet make files.

    Args:
        complete: whether all ranks have come to the end of the program.
    """
    deadline = time.monotonic() + _ENDING_S
    while not (_remove_files(folder) and complete) and time.monotonic() < deadline:
        if not any(_environments(folder)):
            _remove_files(folder)  # of one that has ended meanwhile
            break
        time.sleep(_MAPPED_S)
    _remove_locked(folder, lock)


def ranks_running(folder: Path) -> set[int]:
    """The ranks on this host of which processes run that were started with a launcher's folder, as
    far as it may know."""
    ranks = (launched_rank(environ) for environ in _environments(folder))
    return {rank for rank in ranks if rank is not None}


def _environments(folder: Path) -> Iterator[Mapping[str, str]]:
    """Those of the processes that run and were started with a launcher's folder."""
    told = os.fsencode(f"{FOLDER}={folder}")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it is gone
            words = _environment(process).split(b"\0")
            if told in words:
                pairs = (os.fsdecode(word).partition("=") for word in words)
                yield {name: value for name, _, value in pairs}


def _environment(process: Path) -> bytes:
    """That of a process, also of one whose first thread has ended before the others."""
    if found := (process / "environ").read_bytes():
        return found
    threads = (process / "task").glob("[0-9]*")
    return next(filter(None, ((thread / "environ").read_bytes() for thread in threads)), b"")


def _remove_locked(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)  # until then it stays there in NFS, by another name
    shutil.rmtree(folder, ignore_errors=True)


def remove_session(mpiexec: int) -> None:
    """Remove the folder that Open MPI's mpiexec leaves among temporary files where it was killed.

    Args:
        mpiexec: the number of its process, which has ended.
    """
    shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{mpiexec}"), ignore_errors=True)


def remove_leftovers(shared: Path | None = None) -> None:
    """Remove what launchers that were killed have left behind on this host. One that lives holds a
    lock; and files of MPI's may be in use: then the next one sees to it.

    Args:
        shared: where they may have made folders, too. Those of other hosts' launchers stay: not all
            file systems tell one host of another's locks.
    """
    locks = [*Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}")]
    if shared is not None:
        locks += shared.glob(f".{PREFIX}*/{LOCK}")
    host = os.fsencode(socket.gethostname())
    for lock in locks:
        with suppress(OSError):  # another user's; or another launcher is quicker
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if _is_left_behind(lock, descriptor, host):
                _remove_locked(lock.parent, descriptor)
            else:
                os.close(descriptor)


def _is_left_behind(lock: Path, descriptor: int, host: bytes) -> bool:
    """Whether a folder is that of a launcher of this user and host that was killed, and all that it
    has left elsewhere could be removed."""
    with suppress(OSError):
        own = {os.fstat(descriptor).st_uid, lock.parent.lstat().st_uid} == {os.geteuid()}
        if own and os.read(descriptor, len(host) + 1) in (host, b""):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ended = not any(_environments(lock.parent))  # else they may yet make files
            return _remove_files(lock.parent) and ended and _remove_session_of(lock.parent)
    return False


def _remove_session_of(folder: Path) -> bool:
    """Remove that of a launcher that was killed; whether its mpiexec has ended."""
    with suppress(OSError, ValueError):  # it was not started
        number = int((folder / MPIEXEC).read_text())
        if Path(f"/proc/{number}").exists():
            return False
        remove_session(number)
    return True


def _remove_files(folder: Path) -> bool:
    """Remove the files that MPI has made in `_PLACES` since a launcher has made its folder, and no
    process uses, and folders of sockets; whether that is all."""
    with suppress(OSError):  # another launcher is quicker
        since_s = (folder / LOCK).stat().st_mtime
        _remove_sockets(since_s)
        found = {path for place in _PLACES for path in place.glob("*") if _is_left(path, since_s)}
        free = found - in_use(found)
        if free:
            time.sleep(_MAPPED_S)
            free -= in_use(free)
        for path in free:
            path.unlink()
        return free == found
    return True


def _is_left(path: Path, since_s: float) -> bool:
    return _PLACES[path.parent].fullmatch(path.name) is not None and _is_own(path, since_s)


def _is_own(path: Path, since_s: float) -> bool:
    with suppress(OSError):  # it is gone
        stat = path.lstat()
        return stat.st_uid == os.geteuid() and stat.st_ctime >= since_s
    return False


def _remove_sockets(since_s: float) -> None:
    """Remove the folders `_SOCKETS` that have changed since then and hold nothing but sockets of
    processes that have ended. An empty one may be about to be used."""
    for folder in Path(tempfile.gettempdir()).glob(_SOCKETS):
        with suppress(OSError):  # another launcher is quicker
            sockets = [*folder.iterdir()] if _is_own(folder, since_s) else []
            if sockets and all(map(_is_dead, sockets)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_dead(path: Path) -> bool:
    """Whether a path is a socket that no process has bound; one that has does not notice."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asks:  # these listen to streams
        try:
            asks.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def in_use(paths: Set[Path]) -> set[Path]:
    """Those of some files that a process has mapped or open. Local. Cost: a file a few system
    calls; where the file system has no leases, what all processes have is read."""
    leased = {path: _can_be_leased(path) for path in paths}
    used = {path for path, can in leased.items() if can is False}
    for pause_s in _LOOKED_S if used else ():  # another launcher may just have looked
        time.sleep(pause_s)
        used = {path for path in used if _can_be_leased(path) is False}
    unknown = {path for path, can in leased.items() if can is None}
    return used | (unknown & _mapped() if unknown else set())


def _can_be_leased(path: Path) -> bool | None:
    """Whether the kernel gives a lease on a file, which it does only where nobody else has the file
    mapped or open; None where it gives none there."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return None
    try:
        # Who opens the file just now waits until it is given back, and the kernel tells this
        # process so: by a signal that is ignored, where the usual one would end it.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return False if error.errno == errno.EAGAIN else None
    finally:
        os.close(descriptor)  # which gives the lease back
    return True


def _mapped() -> set[Path]:
    """What processes have mapped or open in `_PLACES`, as far as this one may know."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or it is gone
            lines = (process / "maps").read_text(errors="replace").splitlines()
            used |= {Path(line.split(None, 5)[-1]) for line in lines if "/" in line}
            for opened in (process / "fd").iterdir():
                with suppress(FileNotFoundError):  # it is closed
                    used.add(Path(os.readlink(opened)))
    return {path for path in used if path.parent in _PLACES}
