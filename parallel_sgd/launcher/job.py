"""Run mpiexec, and end the job when required."""

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

#: Exit code of a job that exceeded its time limit, as for timeout(1).
TIMED_OUT = 124

#: Seconds after each signal until mpiexec gets the next, harder signal.
_NEXT_SIGNAL_S = {signal.SIGINT: 1.5, signal.SIGTERM: 3.0}

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Signal that mpiexec forwards to the ranks, in both Open MPI and MPICH.
NOTICE_SIGNAL = signal.SIGUSR1

_PR_SET_PDEATHSIG = 1


@dataclass
class Signals:
    """The signals received by this process within `caught_signals`.

    Args:
        notice_signals: the signals that are preemption notices: the job is to leave by itself.

    Attributes:
        ending: the received signals that end the job.
        notices: the received notices, in order.
    """

    notice_signals: Sequence[signal.Signals] = ()
    ending: list[signal.Signals] = field(default_factory=list)
    notices: list[signal.Signals] = field(default_factory=list)


@dataclass(frozen=True)
class Deadline:
    """The time by which a job has to be over, including all its restarts.

    Attributes:
        timeout_s: the time limit that was given.
        at_s: the deadline, on the monotonic clock.
    """

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float | None) -> Deadline | None:
        """Return a deadline `timeout_s` from now, or None without a limit."""
        return None if timeout_s is None else cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def is_past(self) -> bool:
        return time.monotonic() > self.at_s

    @property
    def message(self) -> str:
        return f"the job ran longer than {self.timeout_s:g} s"


@dataclass(frozen=True)
class JobEnd:
    """The end of an mpiexec.

    Attributes:
        code: mpiexec's exit code, 128 + the signal that ended mpiexec or was sent to this process,
            or `TIMED_OUT`.
        killed: an error line, if a signal from outside has ended mpiexec itself.
    """

    code: int
    killed: str | None = None


def run_job(
    command: Sequence[str],
    environ: Mapping[str, str],
    deadline: Deadline | None = None,
    supervisor: Supervisor | None = None,
    signals: Signals | None = None,
    *,
    stdin: int | None = None,
) -> JobEnd:
    """Run an mpiexec until it ends.

    SIGINT, SIGTERM and SIGHUP to this process end the job: mpiexec gets a signal, then a harder
    signal, and is then killed, within seconds. If this process is killed itself, mpiexec gets a
    SIGTERM (Linux).

    Args:
        command: mpiexec and its arguments.
        environ: the whole environment.
        deadline: the time to end the job.
        supervisor: the supervisor of the ranks, checked regularly.
        signals: the received signals, if the caller catches them (`caught_signals`). Each notice is
            forwarded to the ranks.
        stdin: mpiexec's standard input, as for `subprocess.Popen`. None: that of this process.

    Raises:
        UserError: mpiexec cannot be started.
    """
    if signals is None:
        with caught_signals() as signals:
            return run_job(command, environ, deadline, supervisor, signals, stdin=stdin)
    try:
        prepare = _child_setup(signals.notice_signals)
        job = subprocess.Popen(command, env=environ, stdin=stdin, preexec_fn=prepare)
    except OSError as error:
        raise UserError(f"mpiexec must be a program that runs: {command[0]!r} ({error})") from None
    try:
        end = _wait_until_ended(job, deadline, supervisor, signals)
        if supervisor is not None:
            supervisor.print_errors()
        return end
    except BaseException:  # an error in this process: leave no process behind
        _end_mpiexec(job, signal.SIGTERM)
        raise


def _wait_until_ended(
    job: subprocess.Popen[bytes],
    deadline: Deadline | None,
    supervisor: Supervisor | None,
    signals: Signals,
) -> JobEnd:
    """Wait until mpiexec ends, or end it. Arguments as for `run_job`."""
    forwarded = 0
    if supervisor is not None:
        supervisor.record_mpiexec(job.pid)
    # bounded: the user's job, which --timeout-s, its ranks and the supervisor (reason_to_end) end
    while job.poll() is None:
        if signals.ending:
            _end_mpiexec(job, signals.ending[0])
            break
        if deadline is not None and deadline.is_past:
            write_stderr(f"parallel-sgd: error: {deadline.message}")
            if supervisor is not None:
                supervisor.show_stacks()
            _end_mpiexec(job, signal.SIGTERM)
            return JobEnd(TIMED_OUT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(0.05)
        if supervisor is not None:
            supervisor.check()
            why = supervisor.reason_to_end()
            if why is not None:
                write_stderr(f"parallel-sgd: error: {why}; ending the job")
                _end_mpiexec(job, signal.SIGTERM)
                return JobEnd(int(not supervisor.all_finished))
        if len(signals.notices) > forwarded:
            _forward_notice(signals.notices[forwarded], job, supervisor)
            forwarded += 1
    remove_session(job.pid)
    if signals.ending:  # also if mpiexec ended first: a terminal sends Ctrl-C to both
        write_stderr(f"parallel-sgd: {signals.ending[0].name}: the job was ended")
        return JobEnd(128 + signals.ending[0])
    if job.returncode >= 0:
        return JobEnd(job.returncode)
    number = -job.returncode
    name = "mpiexec" if supervisor is None else supervisor.launcher
    return JobEnd(128 + number, f"{name} (pid {job.pid}) was ended by {_signal_text(number)}")


def _signal_text(number: int) -> str:
    """Return a signal's name; for SIGPIPE with its cause."""
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return f"{name}: nobody reads its output" if number == signal.SIGPIPE else name


def _forward_notice(
    notice: signal.Signals, job: subprocess.Popen[bytes], supervisor: Supervisor | None
) -> None:
    """Send a preemption notice to the ranks: directly on this host, and by mpiexec on remote hosts.

    A rank that only serves could not pass the notice on to the workers.
    """
    write_stderr(f"parallel-sgd: {notice.name}: the ranks are asked to leave")
    if supervisor is None or not (supervisor.send_signal(notice) and supervisor.all_local):
        job.send_signal(NOTICE_SIGNAL)


def _end_mpiexec(job: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """End mpiexec: by a signal, then by a harder signal, then by SIGKILL."""
    numbers = [signal.SIGTERM] if first != signal.SIGINT else [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        # A terminal's Ctrl-C has already reached mpiexec, and a second one means "do not clean up".
        if number != signal.SIGINT or not _is_in_foreground():
            job.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_NEXT_SIGNAL_S[number])
            return
    job.kill()
    # bounded: it has been sent SIGKILL
    job.wait()
    remove_session(job.pid)


def _is_in_foreground() -> bool:
    """Return True if a terminal's Ctrl-C reaches this process, whatever its standard input is."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # no terminal
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # the terminal is gone
        return False
    finally:
        os.close(terminal)


@contextlib.contextmanager
def caught_signals(notice_signals: Sequence[signal.Signals] = ()) -> Iterator[Signals]:
    """Collect notices and the signals that end a program, instead of being ended by them.

    Args:
        notice_signals: the signals to collect as notices. If such a signal would otherwise end a
            program, a second one ends the job.
    """
    signals = Signals(notice_signals)

    def collect(number: int, frame: FrameType | None) -> None:
        got = signal.Signals(number)
        ends = got not in notice_signals or (got in END_SIGNALS and got in signals.notices)
        (signals.ending if ends else signals.notices).append(got)

    # An ignored signal (nohup, a shell's background job) stays ignored, here and in the job.
    previous = {
        number: signal.signal(number, collect)
        for number in (*END_SIGNALS, *notice_signals)
        if number in notice_signals or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _child_setup(notice_signals: Sequence[signal.Signals]) -> Callable[[], None]:
    """Return a function for the child to run between fork and exec.

    The function makes the kernel end the child when this process ends (Linux), and makes the child
    ignore notices: a batch system may send a notice to all processes, and mpiexec must not end by
    it. mpiexec itself handles `NOTICE_SIGNAL`; torchrun does not, and must not end by that either.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        for number in {*notice_signals, NOTICE_SIGNAL} if notice_signals else ():
            signal.signal(number, signal.SIG_IGN)

    return prepare
