"""A job: start, watch and end; and all that a job leaves behind."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from parallel_sgd.command_line.cluster import EmulatedHosts
from parallel_sgd.communication import without_launcher
from parallel_sgd.launcher.cleanup import in_use

from .diary import diaries

ROOT = Path(__file__).parents[2]
OUTPUT, TEMPORARY = "output", "t"  #: in a run's folder; a short name, for paths of sockets
OUTPUT_AT_MOST = 4000  #: characters of a job's output that are kept
GONE_S = 5.0  #: how long processes of a job that has ended may take to be gone
STACKS = signal.SIGUSR1  #: makes a rank print where all of its threads are
SHARED_MEMORY = Path("/dev/shm")
OF_MPIEXEC = Path("/tmp"), "hydra_*"  #: where MPICH's has files, whatever TMPDIR is

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x00020000


@dataclass(frozen=True)
class Settings:
    """The settings of a job's program."""

    folder: str  #: of the run, for checkpoints and all more files
    family: str  #: of `FAMILIES`
    save_every: int  #: samples between two checkpoints; 0: none
    timeout_s: float  #: of the communicator
    clock_back: int = 0  #: the step that begins with the clock set back by a day; 0: none
    endless: bool = False  #: train until stopped, with evaluations


class Job:
    """`parallel-sgd run` of a program of this package, in a process of its own.

    Args:
        program: of `programs`, by name.
        options: more of `parallel-sgd run`.
        hosts: of the ranks; None: this machine.
    """

    def __init__(
        self,
        program: str,
        settings: Settings,
        ranks: int,
        options: Sequence[str] = (),
        hosts: EmulatedHosts | None = None,
    ) -> None:
        folder = self.folder = Path(settings.folder)
        command = [sys.executable, "-m", "parallel_sgd", "run", "-n", str(ranks), *options]
        if hosts:
            command = [*hosts.inside, *command, *hosts.run_options]
        temporary = folder / TEMPORARY
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environ = without_launcher(os.environ) | (hosts.environment if hosts else {})
        with (folder / OUTPUT).open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "-m", f"{__package__}.programs", program, json.dumps(asdict(settings))],
                cwd=folder,
                env=environ | {"PYTHONPATH": path, "TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.began_s = time.monotonic()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def said(self) -> str:
        """The end of the output."""
        return (self.folder / OUTPUT).read_text(errors="replace")[-OUTPUT_AT_MOST:]

    def wait(self, seconds: float) -> bool:
        """Wait up to some seconds; return whether the job has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        return self.ended

    def members(self) -> list[int]:
        """Return the launcher, and all processes below the launcher."""
        return [] if self.ended else list(descendants(self.process.pid))

    def give_up(self) -> None:
        """Have every living rank print the stacks of its threads, and kill the job."""
        for pid in {book.pid for book in diaries(self.folder)} & {*descendants(os.getpid())}:
            signalled(pid, signal.SIGCONT)
            signalled(pid, STACKS)
        time.sleep(1.0)
        self.kill()

    def kill(self) -> None:
        for pid in self.members():
            signalled(pid, signal.SIGKILL)
        self.process.wait()


def belongings(work: Path, hosts: EmulatedHosts | None = None) -> set[Path]:
    """Return all files and folders in places of possible leftovers.

    In the job's working directory only folders of launchers and temporary files count.
    """
    found = {*SHARED_MEMORY.glob("*"), *work.glob(".parallel_sgd-*"), *(work / TEMPORARY).glob("*")}
    of_mpiexec = {*OF_MPIEXEC[0].glob(OF_MPIEXEC[1])}
    found |= of_mpiexec - in_use(of_mpiexec)  # without a process: of an ended job
    return found | {*Path(hosts.folder).glob("*")} if hosts else found


def files_left(before: set[Path], work: Path, hosts: EmulatedHosts | None = None) -> list[str]:
    """Remove and return all new belongings. Call after the end of all processes."""
    found = sorted(belongings(work, hosts) - before)
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # another job's, which was quicker
                path.unlink()
    return [str(path) for path in found]


def processes_left(wait_s: float = GONE_S) -> list[str]:
    """End the processes that still run below this process after some seconds.

    Call only if no job runs: then all such processes belong to ended jobs. Return their commands.
    """
    left = wait_for_end(wait_s)
    lines = []
    for pid in left:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            lines.append(words.replace("\0", " ")[:200].strip() or f"process {pid}")
    while left:
        for pid in left:
            signalled(pid, signal.SIGKILL)
        left = wait_for_end(0.02)
    return lines


def wait_for_end(wait_s: float = GONE_S) -> list[int]:
    """Wait until nothing runs below this process; return the rest after some seconds."""
    deadline = time.monotonic() + wait_s
    while (left := _below()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def namespaces_left() -> list[str]:
    """Return network namespaces of emulated hosts left by this process."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [
        line for line in done.stdout.splitlines() if line.startswith(f"psgd-hosts-{os.getpid()}-")
    ]


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants, in all sessions."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def signalled(pid: int, number: int) -> bool:
    """Send a signal to a process; return whether the process exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def isolate() -> bool:
    """Adopt every process without a parent, and have a private ``/dev/shm``, to find leftovers.

    Returns:
        Whether ``/dev/shm`` is private: only root may have that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    if os.geteuid() != 0 or libc.unshare(_CLONE_NEWNS) != 0:
        return False
    for line in ("mount --make-rprivate /", f"mount -t tmpfs none {SHARED_MEMORY}"):
        subprocess.run(line.split(), check=True)
    return True


def _below() -> list[int]:
    """Return the running processes below this process; collect ended processes."""
    running = []
    for pid in list(descendants(os.getpid()))[1:]:
        with suppress(ChildProcessError):  # another's child, which collects it
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                continue
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                running.append(pid)
    return running
