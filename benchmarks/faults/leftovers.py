"""What a job leaves behind beside processes: shared memory, temporary files, namespaces."""

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
    """Give this process, and all that it starts, a ``/dev/shm`` and mounts of its own, which go
    with the last of them; so what appears there is theirs. Whether that was allowed (root's)."""
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        return False
    for line in ("mount --make-rprivate /", f"mount -t tmpfs none {SHARED_MEMORY}"):
        subprocess.run(line.split(), check=True)
    return True


class Belongings:
    """What was there before a job, in the places in which its leftovers would be.

    Args:
        places: folders.
        work: the job's working directory, where only folders of launchers count.
    """

    def __init__(self, *places: Path, work: Path) -> None:
        self._before = {place: _names(place) for place in (SHARED_MEMORY, *places)}
        self._files, self._work = _files_of_mpiexec(), work

    def left(self) -> list[str]:
        """What has come since, and is removed now. To be called when no process is left, and a
        launcher of the job's has come to its end."""
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
    """Network namespaces of emulated hosts that a process has made and not removed."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line.startswith(f"psgd-hosts-{pid}-")]


def _files_of_mpiexec() -> set[str]:
    """Those that no process uses: of a job that has ended."""
    place, pattern = OF_MPIEXEC
    found = {*place.glob(pattern)}
    return {str(path) for path in found - in_use(found)}


def _names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()} if place.is_dir() else set()
