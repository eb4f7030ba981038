"""Leftovers of a job beside processes: shared memory, temporary files, namespaces."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from parallel_sgd.launcher.cleanup import in_use

SHARED_MEMORY = Path("/dev/shm")
OF_MPIEXEC = Path("/tmp"), "hydra_*"  #: where MPICH's has files, whatever TMPDIR is
_CLONE_NEWNS = 0x00020000


def own_shared_memory() -> bool:
    """Give this process and its children a private ``/dev/shm``, so all new files there are theirs.

    Returns:
        Whether the system allowed this: only root may.
    """
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return False
    for line in ("mount --make-rprivate /", f"mount -t tmpfs none {SHARED_MEMORY}"):
        subprocess.run(line.split(), check=True)
    return True


class Belongings:
    """The files before a job, in all places of possible leftovers.

    Args:
        places: folders.
        work: the job's working directory: only folders of launchers count.
    """

    def __init__(self, *places: Path, work: Path) -> None:
        self._before = {place: _names(place) for place in (SHARED_MEMORY, *places)}
        self._files, self._work = _files_of_mpiexec(), work

    def left(self) -> list[str]:
        """Remove and return all new files. Call after the end of all processes."""
        found = [str(path) for path in sorted(self._work.glob(".parallel_sgd-*"))]
        found += sorted(_files_of_mpiexec() - self._files)
        for place, before in self._before.items():
            for name in sorted(_names(place) - before):
                path = place / name
                found.append(str(path))
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):  # another job's, which was quicker
                        path.unlink()
        return found


def namespaces_left(pid: int) -> list[str]:
    """Return network namespaces of emulated hosts left by a process."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line.startswith(f"psgd-hosts-{pid}-")]


def _files_of_mpiexec() -> set[str]:
    """Return files without a process: of an ended job."""
    place, pattern = OF_MPIEXEC
    found = {*place.glob(pattern)}
    return {str(path) for path in found - in_use(found)}


def _names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()} if place.is_dir() else set()
