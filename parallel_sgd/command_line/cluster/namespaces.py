"""Network namespaces and what is beside them, by name: making, removing, and what was left behind.

All names begin with the process that made them, so that the next one can tell what nobody uses.
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

PREFIX = "psgd-hosts"  #: of all names: then the process that made them, then which it is
PROGRAMS = ("ip", "tc", "unshare", "hostname", "mount")

#: A shell's line in a host's namespace, before its name and a command: the name, and shared memory
#: of its own, which goes when the last process does, however it ends.
SETUP = 'mount -t tmpfs none /dev/shm && hostname "$0" && exec "$@"'

_KILLED_S = 5.0  #: how long processes may take to be gone
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def names_of(pid: int, count: int) -> tuple[str, tuple[str, ...]]:
    """The names of the switch and of the hosts that a process makes."""
    prefix = f"{PREFIX}-{pid}"
    return f"{prefix}-switch", tuple(f"{prefix}-{i}" for i in range(count))


def require() -> None:
    """Raise a UserError where this process may not make namespaces, or lacks programs for it."""
    if os.geteuid() != 0:
        raise UserError("emulated hosts need root, which alone may make network namespaces")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"emulated hosts need {', '.join(missing)} in PATH (Debian: iproute2, util-linux)"
        )


def call(command: Sequence[str]) -> None:
    """Run one command; where it fails, raise a UserError with what it has said."""
    done = _run_quietly(command)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"emulated hosts cannot be made here: {shlex.join(command)}: {said}")


def remove(names: Iterable[str]) -> int:
    """End what runs in those of these namespaces that are there, and remove them with their links;
    how many processes were ended."""
    names, ended = list(names), set[str]()
    deadline = time.monotonic() + _KILLED_S
    while pids := {pid for name in names for pid in _output(["ip", "netns", "pids", name]).split()}:
        ended |= pids  # once more: between the question and the end some have started others
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
    """Remove what processes that are gone have made: hosts, what runs there, hostfiles, folders.

    Returns:
        A line for each thing that was found.
    """
    temporary = Path(tempfile.gettempdir())
    listed = _output(["ip", "netns", "list"]).splitlines()
    folders = [path.name for path in temporary.iterdir() if _is_owned_folder(path)]
    # Only now: whoever has made some of that lives, or is gone.
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
    """Whether this user has made it. Others may write there, too: what lies in their folders, or
    where their links lead, says nothing to us."""
    try:
        facts = path.lstat()
    except OSError:  # it is gone
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


def leftovers(names: Iterable[str], processes: set[int]) -> list[str]:
    """Of some names, those that we give, and whose makers do not live; without what is behind."""
    matches = [re.match(rf"{PREFIX}-(\d+)-\w+", name) for name in names]
    return [match.group() for match in matches if match and int(match.group(1)) not in processes]


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the body as Ctrl-C does: by an exception, so that it cleans up."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in _ENDS[1:] if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python lets no other set a handler
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Keep the signals that end a program waiting until the body is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _output(command: Sequence[str]) -> str:
    return _run_quietly(command).stdout


def _run_quietly(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
