"""Run mpiexec, and see to it that the job ends when it should."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from ..errors import UserError
from .roll import Roll

#: Exit code of a job that outran its time, as of timeout(1).
TIMED_OUT = 124

#: After a signal was passed on: how long until mpiexec gets the next, harder one.
_PATIENCE_S = {signal.SIGINT: 1.5, signal.SIGTERM: 3.0}

_PR_SET_PDEATHSIG = 1


def run_job(
    command: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float | None = None,
    roll: Roll | None = None,
) -> int:
    """Run an mpiexec to its end.

    SIGINT and SIGTERM (and SIGHUP) to this process end the job: mpiexec is asked, asked harder, and
    killed, within seconds. Should this process be killed itself, mpiexec gets a SIGTERM (Linux).

    Args:
        command: mpiexec and its arguments.
        environ: the whole environment.
        timeout_s: end the job after so many seconds.
        roll: of the ranks: one that is gone without a word is named, and then the job has failed,
            whatever mpiexec says.

    Returns:
        mpiexec's exit code, 128 + the signal that ended it or that this process got, or
        `TIMED_OUT`: 0 only if mpiexec says that all went well.
    """
    received: list[signal.Signals] = []
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with _catch(received):
        try:
            job = subprocess.Popen(command, env=environ, preexec_fn=_die_with_parent())
        except OSError as error:
            raise UserError(
                f"mpiexec must be a program that runs: {command[0]!r} ({error})"
            ) from None
        while job.poll() is None:
            if received:
                _end(job, received[0])
                break
            if deadline is not None and time.monotonic() > deadline:
                print(
                    f"parallel-sgd: error: the job ran longer than {timeout_s:g} s", file=sys.stderr
                )
                if roll is not None:
                    roll.show_stacks()
                _end(job, signal.SIGTERM)
                _remove_session(job)
                return TIMED_OUT
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(0.05)
            if roll is not None:
                roll.look()
                why = roll.does_not_end()
                if why is not None:
                    print(f"parallel-sgd: error: {why}; ending it", file=sys.stderr)
                    _end(job, signal.SIGTERM)
                    _remove_session(job)
                    return 1
    _remove_session(job)
    if received:  # also where mpiexec was quicker: a terminal sends its Ctrl-C to both
        print(f"parallel-sgd: {received[0].name}: the job was ended", file=sys.stderr)
        return 128 + received[0]
    code = job.returncode if job.returncode >= 0 else 128 - job.returncode
    gone = None if roll is None else roll.gone_without_a_word()
    if gone is not None:
        print(f"parallel-sgd: error: {gone}", file=sys.stderr)
    return code or int(gone is not None)


def _end(job: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """Ask, ask harder, kill."""
    asked = [signal.SIGTERM] if first != signal.SIGINT else [signal.SIGINT, signal.SIGTERM]
    for number in asked:
        # A terminal's Ctrl-C has reached mpiexec already, and a second one is "do not clean up".
        if number != signal.SIGINT or not _foreground():
            job.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_PATIENCE_S[number])
            return
    job.kill()
    job.wait()


def _remove_session(job: subprocess.Popen[bytes]) -> None:
    """Remove the folder that Open MPI's mpiexec leaves behind where it was killed."""
    if job.returncode == -signal.SIGKILL:
        shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{job.pid}"), ignore_errors=True)


def _foreground() -> bool:
    """Whether a terminal sends its Ctrl-C to this process."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


@contextlib.contextmanager
def _catch(received: list[signal.Signals]) -> Iterator[None]:
    """Collect the signals that end a program, instead of ending by them."""

    def collect(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # One that is ignored (nohup, a shell's background job) stays so, here and in the job.
    previous = {
        number: signal.signal(number, collect)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _die_with_parent() -> Callable[[], None] | None:
    """For the child, between fork and exec: have the kernel end it with this process."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
