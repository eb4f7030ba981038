"""Make and remove the launcher's folder, and remove files left behind by killed jobs.

Killed launchers, mpiexecs or ranks leave folders, MPI's shared memory and temporary files, and
sockets of Python processes on a host. The launcher removes all of these, or else the next launcher
on the same host. Local.
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
"""Prefix of the folder's name; names of the lock and of the file with mpiexec's process id."""

#: Folders with MPI's shared memory, and with MPICH's file of the host's topology (open as long as
#: it is used), and the names of these files. Nothing else is removed there.
_SHARED_PLACES = {
    Path("/dev/shm"): re.compile(r"(mpich_shm|sm_segment\.|ucx_shm_posix_)[^/]*"),
    Path("/tmp"): re.compile(r"hydra_hwloc_xmlfile_\w{6}"),  # whatever TMPDIR is
}

#: Temporary folders with sockets of Python processes, such as the workers of a DataLoader. A
#: process that is killed leaves its folder behind.
_SOCKETS = "pymp-*"

#: A file made in shared memory is mapped by its process within this time.
_MAP_WAIT_S = 0.05

#: Waits for another launcher that tests the same file for use.
_LEASE_WAITS_S = (0.005, 0.03)

#: Ranks without mpiexec end within this time; so do a DataLoader's workers, which look for their
#: rank every 5 s.
_EXIT_TIMEOUT_S = 6.0


def locked_folder(shared: Path | None = None) -> tuple[Path, int]:
    """Make a new folder with a lock held by this process.

    Return the folder and the lock's descriptor.

    Args:
        shared: the folder to make it in, as a hidden folder. None: the folder of temporary files.

    Raises:
        OSError: the folder cannot be made or locked; nothing stays behind.
    """
    prefix = PREFIX if shared is None else f".{PREFIX}"
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=shared))
    new, lock = folder / f"{LOCK}.new", -1
    try:
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # bounded: LOCK_NB
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not visible to any process yet
        os.write(lock, os.fsencode(socket.gethostname()))
        new.rename(folder / LOCK)
    except OSError:
        if lock >= 0:
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def remove(folder: Path, lock: int, *, complete: bool) -> None:
    """Remove a launcher's folder and the files that MPI has left since; close the folder's lock.

    Wait up to `_EXIT_TIMEOUT_S` for processes of the job. If mpiexec was killed, nobody has waited
    for the ranks that had not yet signed on, and these may still create files.

    Args:
        complete: True if all ranks have reached the end of the program.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while not (_remove_mpi_files(folder) and complete) and time.monotonic() < deadline:
        if not any(_environments(folder)):
            _remove_mpi_files(folder)  # of a process that has ended meanwhile
            break
        time.sleep(_MAP_WAIT_S)
    _remove_locked(folder, lock)


def ranks_running(folder: Path) -> set[int]:
    """Return the ranks on this host with a running process, started with a launcher's folder.

    Processes of other users are not seen.
    """
    ranks = (launched_rank(environ) for environ in _environments(folder))
    return {rank for rank in ranks if rank is not None}


def _environments(folder: Path) -> Iterator[Mapping[str, str]]:
    """Yield the environment of each running process that was started with a launcher's folder."""
    entry = os.fsencode(f"{FOLDER}={folder}")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's process, or it has ended
            words = _environment(process).split(b"\0")
            if entry in words:
                pairs = (os.fsdecode(word).partition("=") for word in words)
                yield {name: value for name, _, value in pairs}


def _environment(process: Path) -> bytes:
    """Return a process's environment, even if its first thread has ended before the others."""
    if found := (process / "environ").read_bytes():
        return found
    threads = (process / "task").glob("[0-9]*")
    return next(filter(None, ((thread / "environ").read_bytes() for thread in threads)), b"")


def _remove_locked(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)  # until then NFS keeps the file under another name
    shutil.rmtree(folder, ignore_errors=True)


def remove_session(mpiexec: int) -> None:
    """Remove the temporary folder that a killed Open MPI mpiexec leaves behind.

    Args:
        mpiexec: the process id of the mpiexec, which has ended.
    """
    shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{mpiexec}"), ignore_errors=True)


def remove_leftovers(shared: Path | None = None) -> None:
    """Remove the files left behind on this host by killed launchers.

    A running launcher holds a lock on its folder. Files of MPI's that are still in use stay, for
    the next launcher to remove.

    Args:
        shared: a shared folder to search, too. Folders made by launchers on other hosts stay,
            because not all file systems show the locks of other hosts.
    """
    locks = [*Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}")]
    if shared is not None:
        locks += shared.glob(f".{PREFIX}*/{LOCK}")
    host = os.fsencode(socket.gethostname())
    for lock in locks:
        with suppress(OSError):  # another user's, or removed by another launcher
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if _is_abandoned(lock, descriptor, host):
                _remove_locked(lock.parent, descriptor)
            else:
                os.close(descriptor)


def _is_abandoned(lock: Path, descriptor: int, host: bytes) -> bool:
    """Return True if a folder can be removed: its launcher, of this user and host, was killed.

    Remove the launcher's other files first; the result is True only if all of these could be
    removed.
    """
    with suppress(OSError):
        own = {os.fstat(descriptor).st_uid, lock.parent.lstat().st_uid} == {os.geteuid()}
        if own and os.read(descriptor, len(host) + 1) in (host, b""):
            # bounded: LOCK_NB
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ended = not any(_environments(lock.parent))  # else more files may appear
            return _remove_mpi_files(lock.parent) and ended and _remove_session_in(lock.parent)
    return False


def _remove_session_in(folder: Path) -> bool:
    """Remove the mpiexec session of a killed launcher. Return True if its mpiexec has ended."""
    with suppress(OSError, ValueError):  # mpiexec was not started
        number = int((folder / MPIEXEC).read_text())
        if Path(f"/proc/{number}").exists():
            return False
        remove_session(number)
    return True


def _remove_mpi_files(folder: Path) -> bool:
    """Remove unused files in `_SHARED_PLACES`, made by MPI since the launcher's folder was made.

    Also remove folders of sockets. Return True if no file is left.
    """
    with suppress(OSError):  # removed by another launcher
        since_s = (folder / LOCK).stat().st_mtime
        _remove_sockets(since_s)
        found = {
            path
            for place in _SHARED_PLACES
            for path in place.glob("*")
            if _is_own_mpi_file(path, since_s)
        }
        free = found - in_use(found)
        if free:
            time.sleep(_MAP_WAIT_S)
            free -= in_use(free)
        for path in free:
            path.unlink()
        return free == found
    return True


def _is_own_mpi_file(path: Path, since_s: float) -> bool:
    return _SHARED_PLACES[path.parent].fullmatch(path.name) is not None and _is_recent_and_own(
        path, since_s
    )


def _is_recent_and_own(path: Path, since_s: float) -> bool:
    with suppress(OSError):  # removed meanwhile
        stat = path.lstat()
        return stat.st_uid == os.geteuid() and stat.st_ctime >= since_s
    return False


def _remove_sockets(since_s: float) -> None:
    """Remove folders named `_SOCKETS`, changed since then, with only sockets of ended processes.

    An empty folder stays: a process may be about to use it.
    """
    for folder in Path(tempfile.gettempdir()).glob(_SOCKETS):
        with suppress(OSError):  # removed by another launcher
            sockets = [*folder.iterdir()] if _is_recent_and_own(folder, since_s) else []
            if sockets and all(map(_is_unbound_socket, sockets)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_unbound_socket(path: Path) -> bool:
    """Return True if a path is a socket not bound by any process.

    A process bound to the socket does not notice the test.
    """
    if not path.is_socket():
        return False
    # The sockets listen for streams: a datagram socket makes no connection.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def in_use(paths: Set[Path]) -> set[Path]:
    """Return the files that a process has mapped or open.

    Local. Cost: a few system calls for each file. On a file system without leases, the maps and
    descriptors of all processes are read.
    """
    leased = {path: _can_be_leased(path) for path in paths}
    used = {path for path, can in leased.items() if can is False}
    for pause_s in _LEASE_WAITS_S if used else ():  # another launcher may be testing the file
        time.sleep(pause_s)
        used = {path for path in used if _can_be_leased(path) is False}
    unknown = {path for path, can in leased.items() if can is None}
    return used | (unknown & _paths_in_use() if unknown else set())


def _can_be_leased(path: Path) -> bool | None:
    """Return True if the kernel grants a lease on a file; None if the file system has no leases.

    The kernel grants a lease only if no other process has the file mapped or open.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return None
    try:
        # A process that opens the file meanwhile waits for the end of the lease, and the kernel
        # sends this process a signal. SIGURG is ignored; the default signal would end the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return False if error.errno == errno.EAGAIN else None
    finally:
        os.close(descriptor)  # ends the lease
    return True


def _paths_in_use() -> set[Path]:
    """Return the paths in `_SHARED_PLACES` mapped or opened by processes, as far as visible."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's process, or it has ended
            lines = (process / "maps").read_text(errors="replace").splitlines()
            used |= {Path(line.split(None, 5)[-1]) for line in lines if "/" in line}
            for opened in (process / "fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    used.add(Path(os.readlink(opened)))
    return {path for path in used if path.parent in _SHARED_PLACES}
