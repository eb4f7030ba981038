"""A job: start, watch and end; and the processes that the job leaves."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel_sgd.communication import without_launcher

from .child import STACKS
from .diary import diaries

ROOT = Path(__file__).parents[2]
OUTPUT, TEMPORARY = "output", "t"  #: in a run's folder; a short name, for paths of sockets
GONE_S = 5.0  #: how long processes of a job that has ended may take to be gone

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Adopt every process without a parent, so that the process is found."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class Job:
    """`parallel-sgd run` of a program of this package, in a process of its own.

    Args:
        program: of `__main__.PROGRAMS`.
        settings: its argument, as JSON.
        folder: gets the output, and has the temporary files.
        ranks: how many.
        options: more of `parallel-sgd run`.
        inside: a command that starts the command after it.
        environ: added to the environment.
    """

    def __init__(
        self,
        program: str,
        settings: Mapping[str, Any],
        folder: Path,
        ranks: int,
        options: Sequence[str] = (),
        *,
        inside: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.command = [*inside, sys.executable, "-m", "parallel_sgd", "run", "-n", str(ranks)]
        self.command += [*options, "-m", __package__, program, json.dumps(settings)]
        temporary = self.folder / TEMPORARY
        temporary.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with (self.folder / OUTPUT).open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env={
                    **without_launcher(os.environ),
                    **(environ or {}),
                    "PYTHONPATH": path,
                    "TMPDIR": str(temporary),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.began_s = time.monotonic()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float) -> bool:
        """Wait up to some seconds; return whether the job has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        return self.ended

    def members(self) -> list[int]:
        """Return the launcher, and all processes below the launcher."""
        return [] if self.ended else list(descendants(self.process.pid))

    def show_stacks(self) -> None:
        """Have every living rank print the stacks of its threads."""
        ranks = {book.pid for book in diaries(self.folder)} & set(descendants(os.getpid()))
        for pid in ranks:
            signalled(pid, signal.SIGCONT)
            signalled(pid, STACKS)
        time.sleep(1.0)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the job."""
        for pid in self.members():
            signalled(pid, signal.SIGKILL)
        self.process.wait()


def processes_left(wait_s: float = GONE_S) -> list[str]:
    """End the processes that still run below this process after some seconds.

    Call only if no job runs: then all such processes belong to ended jobs.

    Returns:
        The command line of each process.
    """
    left = wait_for_end(wait_s)
    lines = [_command_line(pid) for pid in left]
    while left:
        for pid in left:
            signalled(pid, signal.SIGKILL)
        time.sleep(0.02)
        left = _below()
    return lines


def wait_for_end(wait_s: float = GONE_S) -> list[int]:
    """Wait until nothing runs below this process; return the rest after some seconds."""
    deadline = time.monotonic() + wait_s
    while (left := _below()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


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


def _command_line(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return " ".join(word.decode(errors="replace") for word in words)[:200].strip()
    return f"process {pid}"
