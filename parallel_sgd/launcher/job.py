"""Run mpiexec, and see to it that the job ends when it should."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from ..communication.stderr import write_stderr
from ..errors import UserError
from .cleanup import remove_session
from .supervisor import Supervisor

#: Exit code of a job that outran its time, as of timeout(1).
TIMED_OUT = 124

#: After a signal was passed on: how long until mpiexec gets the next, harder one.
_PATIENCE_S = {signal.SIGINT: 1.5, signal.SIGTERM: 3.0}

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: What mpiexec passes on to the ranks, that of Open MPI and that of MPICH.
CARRIER = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1


@dataclass
class Signals:
    """Those that this process has got while it was in `caught`.

    Args:
        chosen: those that are notices: that the job is to leave by itself.

    Attributes:
        ending: that end the job.
        notices: as they came.
    """

    chosen: Sequence[signal.Signals] = ()
    ending: list[signal.Signals] = field(default_factory=list)
    notices: list[signal.Signals] = field(default_factory=list)


@dataclass(frozen=True)
class Deadline:
    """When a job has to be at its end, with all its starts.

    Attributes:
        timeout_s: that it was given.
        at_s: on the monotonic clock.
    """

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline | None:
        """From now on so many seconds; none without a limit."""
        return None if timeout_s is None else cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.at_s

    @property
    def told(self) -> str:
        return f"the job ran longer than {self.timeout_s:g} s"


@dataclass(frozen=True)
class JobEnd:
    """How an mpiexec has ended.

    Attributes:
        code: its exit code, 128 + the signal that ended it or that this process got, or
            `TIMED_OUT`.
        killed: that a signal of somebody else has ended mpiexec itself, in a line.
    """

    code: int
    killed: str | None = None


def run_job(
    command: Sequence[str],
    environ: Mapping[str, str],
    deadline: Deadline | None = None,
    roll: Supervisor | None = None,
    signals: Signals | None = None,
    *,
    stdin: int | None = None,
) -> JobEnd:
    """Run an mpiexec to its end.

    SIGINT and SIGTERM (and SIGHUP) to this process end the job: mpiexec is asked, asked harder, and
    killed, within seconds. Should this process be killed itself, mpiexec gets a SIGTERM (Linux).

    Args:
        command: mpiexec and its arguments.
        environ: the whole environment.
        deadline: end the job then.
        roll: of the ranks, to be looked at.
        signals: as they come, where the caller catches them (`caught`). A notice is passed on to
            the ranks.
        stdin: its standard input, as `subprocess.Popen` takes it; None: that of this process.
    """
    if signals is None:
        with caught() as signals:
            return run_job(command, environ, deadline, roll, signals, stdin=stdin)
    try:
        prepare = _before_exec(signals.chosen)
        job = subprocess.Popen(command, env=environ, stdin=stdin, preexec_fn=prepare)
    except OSError as error:
        raise UserError(f"mpiexec must be a program that runs: {command[0]!r} ({error})") from None
    try:
        end = _until_it_ends(job, deadline, roll, signals)
        if roll is not None:
            roll.print_errors()
        return end
    except BaseException:  # an error of ours: nothing is to be left behind
        _end(job, signal.SIGTERM)
        raise


def _until_it_ends(
    job: subprocess.Popen[bytes],
    deadline: Deadline | None,
    roll: Supervisor | None,
    signals: Signals,
) -> JobEnd:
    """Wait for the end of an mpiexec, or end it; as `run_job`."""
    passed_on = 0
    if roll is not None:
        roll.note_mpiexec(job.pid)
    while job.poll() is None:
        if signals.ending:
            _end(job, signals.ending[0])
            break
        if deadline is not None and deadline.is_over:
            write_stderr(f"parallel-sgd: error: {deadline.told}")
            if roll is not None:
                roll.show_stacks()
            _end(job, signal.SIGTERM)
            return JobEnd(TIMED_OUT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(0.05)
        if roll is not None:
            roll.look()
            why = roll.does_not_end()
            if why is not None:
                write_stderr(f"parallel-sgd: error: {why}; ending it")
                _end(job, signal.SIGTERM)
                return JobEnd(int(not roll.all_left))
        if len(signals.notices) > passed_on:
            _pass_on(signals.notices[passed_on], job, roll)
            passed_on += 1
    remove_session(job.pid)
    if signals.ending:  # also where mpiexec was quicker: a terminal sends its Ctrl-C to both
        write_stderr(f"parallel-sgd: {signals.ending[0].name}: the job was ended")
        return JobEnd(128 + signals.ending[0])
    if job.returncode >= 0:
        return JobEnd(job.returncode)
    number = -job.returncode
    return JobEnd(128 + number, f"mpiexec (pid {job.pid}) was ended by {_named(number)}")


def _named(number: int) -> str:
    """The name of a signal, and what it says of a pipe."""
    name = next((one.name for one in signal.Signals if one == number), f"signal {number}")
    return f"{name}: nobody reads what it prints" if number == signal.SIGPIPE else name


def _pass_on(notice: signal.Signals, job: subprocess.Popen[bytes], roll: Supervisor | None) -> None:
    """Tell ranks that they are to leave: those on this host, and by mpiexec where there are others.
    (One that only serves could not speak for the others.)"""
    write_stderr(f"parallel-sgd: {notice.name}: the ranks are asked to leave")
    if roll is None or not (roll.pass_on(notice) and roll.all_here):
        job.send_signal(CARRIER)


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
    remove_session(job.pid)


def _foreground() -> bool:
    """Whether a terminal sends its Ctrl-C to this process, wherever its standard input is from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # there is none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it is gone
        return False
    finally:
        os.close(terminal)


@contextlib.contextmanager
def caught(chosen: Sequence[signal.Signals] = ()) -> Iterator[Signals]:
    """Collect the signals that end a program, instead of ending by them, and notices.

    Args:
        chosen: as notices. One that would end a program otherwise does so when it comes again.
    """
    signals = Signals(chosen)

    def collect(number: int, frame: FrameType | None) -> None:
        got = signal.Signals(number)
        ends = got not in chosen or (got in ENDING and got in signals.notices)
        (signals.ending if ends else signals.notices).append(got)

    # One that is ignored (nohup, a shell's background job) stays so, here and in the job.
    previous = {
        number: signal.signal(number, collect)
        for number in (*ENDING, *chosen)
        if number in chosen or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _before_exec(chosen: Sequence[signal.Signals]) -> Callable[[], None]:
    """For the child, between fork and exec: have the kernel end it with this process (Linux); and
    a notice that a batch system sends to all processes must not end mpiexec."""
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        for number in chosen:
            signal.signal(number, signal.SIG_IGN)

    return prepare
