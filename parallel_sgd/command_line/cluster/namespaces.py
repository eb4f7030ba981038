"""Make and remove network namespaces and related leftovers, by name.

All names begin with the id of the process. So a later process recognizes abandoned namespaces.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...errors import UserError
from .hostfile import remove_written

PREFIX = "psgd-hosts"  #: of all names; then the process id, then the name of the host
PROGRAMS = ("ip", "tc", "unshare", "hostname", "mount")

#: A shell script for a host's namespace, called with the host's name and a command. Sets the name,
#: and mounts shared memory for the host; the kernel removes it with the host's last process.
SETUP = 'mount -t tmpfs none /dev/shm && hostname "$0" && exec "$@"'

_KILLED_S = 5.0  #: how long processes may take to be gone
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def names_of(pid: int, count: int) -> tuple[str, tuple[str, ...]]:
    """Return the names of the switch and of the hosts made by a process."""
    prefix = f"{PREFIX}-{pid}"
    return f"{prefix}-switch", tuple(f"{prefix}-{i}" for i in range(count))


def require() -> None:
    """Raise a UserError if this process may not make namespaces, or lacks programs to make them."""
    if os.geteuid() != 0:
        raise UserError("emulated hosts need root: only root may make network namespaces")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"emulated hosts need {', '.join(missing)} in PATH (Debian: iproute2, util-linux)"
        )


def call(command: Sequence[str]) -> None:
    """Run a command. Raise a UserError with its output if the command fails."""
    done = _run_quietly(command)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"emulated hosts cannot be made here: {shlex.join(command)}: {said}")


def remove(names: Iterable[str]) -> int:
    """End all processes in these namespaces, and remove the namespaces with their links.

    Missing namespaces are ignored. Return the number of ended processes.
    """
    names, ended = list(names), set[str]()
    deadline = time.monotonic() + _KILLED_S
    # bounded: it has a deadline in its body
    while pids := {pid for name in names for pid in _output(["ip", "netns", "pids", name]).split()}:
        ended |= pids  # repeat: meanwhile these may have started new processes
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for name in names:
        _run_quietly(["ip", "netns", "del", name])
    return len(ended)


def remove_leftovers() -> list[str]:
    """Remove everything made by ended processes: hosts, their processes, hostfiles, folders.

    Returns:
        A line for each thing found.
    """
    temporary = Path(tempfile.gettempdir())
    listed = _output(["ip", "netns", "list"]).splitlines()
    folders = [path.name for path in temporary.iterdir() if _is_owned_folder(path)]
    # After the names: so each name's process either is listed here, or has ended.
    living = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    lines = [
        f"{name}, in which {remove([name])} processes ran" for name in leftovers(listed, living)
    ]
    for name in leftovers(folders, living):
        folder = temporary / name
        hostfile = remove_written(folder)
        lines += [str(path) for path in (hostfile, folder) if path]
        shutil.rmtree(folder, ignore_errors=True)
    return lines


def _is_owned_folder(path: Path) -> bool:
    """Return True if a path is a folder of this user's.

    Other users may write there, too: the content of their folders, and the targets of their links,
    must not be trusted.
    """
    try:
        facts = path.lstat()
    except OSError:  # removed meanwhile
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


def leftovers(names: Iterable[str], processes: set[int]) -> list[str]:
    """Return those names that belong to ended processes, without their suffixes."""
    matches = [re.match(rf"{PREFIX}-(\d+)-\w+", name) for name in names]
    return [match.group() for match in matches if match and int(match.group(1)) not in processes]


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the body by an exception, like Ctrl-C, for an orderly cleanup."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in _ENDS[1:] if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python allows handlers only in the main thread
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals to end a program until the body is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _output(command: Sequence[str]) -> str:
    return _run_quietly(command).stdout


def _run_quietly(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # bounded: ip and tc talk to this kernel alone
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
