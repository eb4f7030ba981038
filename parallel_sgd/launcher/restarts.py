"""Runs a job, and where it is lost starts it again: `parallel-sgd run --restarts N`. One of ranks
that survive each other also without being asked to, where it was lost before they had begun.

How a job has ended its ranks say themselves (`verdict`). What fails by its own word would fail
again, and is not started again. A restarted job goes on from its newest whole checkpoint, which the
ranks find by the name of the job (`training.resuming`).
"""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ..communication.job_environment import JOB, RESTART, restarts
from ..communication.liveness.abort import DISK_FULL
from ..communication.liveness.preemption import chosen_signals, requeue
from ..communication.stderr import write_stderr
from .job import TIMED_OUT, Deadline, Signals, caught, run_job
from .options import Request
from .outcome import Ending, Outcome, judge
from .reachable_hosts import Hosts
from .supervisor import Supervisor

PREEMPTED = os.EX_TEMPFAIL  #: exit code 75: all is saved, and the job can be started again

#: A start is in vain if it brings no new checkpoint and is over so soon; of so many in a row the
#: last one is the last.
SOON_S, IN_VAIN = 60.0, 3

#: Before a restart: so long, and twice as long for each start in vain since the last that was not.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

#: What a signal says that has ended a rank.
_BY_SIGNAL: Mapping[int, str] = {
    signal.SIGBUS: "shared memory may be full (df /dev/shm; in a container: --shm-size)",
    signal.SIGTERM: "somebody has ended that rank, or mpiexec, which ends all ranks by it",
}

#: Options of Open MPI's mpiexec and of MPICH's by which what ranks print goes to files.
_OUTPUT_OPTIONS = ("--output", "errfile-pattern")

#: Open MPI's mpiexec gives it where it is ended itself; a rank that the kernel kills for its memory
#: gives that of SIGKILL.
_BY_ONE = (
    "Exit code 1: so it was not killed for its memory; it has called os._exit or MPI_Abort, or "
    "somebody has ended it, or mpiexec, which then ends all ranks"
)

#: The exit code of MPICH's mpiexec where it fails itself; it does where it cannot print.
_MPICH_ITSELF = 255

#: That of Open MPI's where it fails itself, as where nobody reads its pipe any more: it takes no
#: SIGPIPE.
_OPEN_MPI_ITSELF = 1

_UNREAD = "mpiexec has ended the job: nobody reads what it prints"

TOO_FEW = "too few hosts answer"

_LOOKS_EVERY_S = 0.05


class Launch(Protocol):
    """A command, and what is added to the environment."""

    @property
    def command(self) -> tuple[str, ...]: ...

    @property
    def environ(self) -> Mapping[str, str]: ...

    def line(self) -> str: ...


@dataclass
class Attempt:
    """One start of a job, when it is over."""

    code: int
    outcome: Outcome
    seconds: float
    checkpoint: str | None  #: the newest that it has written
    gone: str | None  #: a line on the rank that was gone first
    stopped: bool  #: whether this process has ended it
    asked: bool  #: whether this process, or a rank, was asked to leave


class Restarts:
    """
    Args:
        request: what the user asked for.
        plan: makes a launch of a request; raises a UserError.
        hosts: those that may be left out.
        environ: for the ranks, beside the launch's.
    """

    def __init__(
        self,
        request: Request,
        plan: Callable[[Request], Launch],
        hosts: Hosts,
        environ: Mapping[str, str],
    ) -> None:
        self._request, self._plan, self._hosts, self._environ = request, plan, hosts, environ
        self._done = self._fruitless = self._waits = self._lost_at_start = 0
        self._checkpoint: str | None = None
        self._deadline = Deadline.after(request.timeout_s)
        self._judged = bool(request.restarts or request.survive)  # by the ranks' words alone

    def run(self) -> int:
        """Run the job to its end, and return the exit code.

        0: complete. 75: it has left, as it was asked to. 124: it outran its time. 128 + a signal
        that this process got. Else its own, or 1 where that is 0 and the job is not complete.
        """
        notices = chosen_signals(self._request.preempt_on) if self._request.preempt_on else ()
        with caught(notices) as signals:
            request: Request | None = self._request
            while True:
                attempt = None if request is None else self._attempt(request, signals)
                if attempt is not None and not self._may_go_on(attempt):
                    asked = attempt.asked and not attempt.stopped
                    lost = attempt.outcome.end is Ending.LOST
                    return self._left() if asked and lost else self._exit_code(attempt)
                why = attempt.outcome.why if attempt else TOO_FEW
                if problem := self._why_not_again(attempt):
                    write_stderr(f"parallel-sgd: error: {why}; {problem}")
                    return self._exit_code(attempt)
                pause = min(FIRST_PAUSE_S * 2 ** min(self._waits, 10), LONGEST_PAUSE_S)
                self._waits += 1
                if self._lost_at_start:
                    what = f"nothing was trained on, so the job is started anew in {pause:g} s"
                else:
                    self._done += 1
                    what = f"restart {self._done} of {self._request.restarts} in {pause:g} s, from "
                    what += self._from()
                write_stderr(f"parallel-sgd: {why}: {what}")
                self._pause(pause, signals)
                if not self._is_over(signals):
                    request = self._hosts.possible(self._request)  # takes its time, too
                if self._is_over(signals):
                    return self._ended(signals)

    def _attempt(self, request: Request, signals: Signals) -> Attempt:
        """Start the job once."""
        launch, began = self._plan(replace(request, restart=self._done)), time.monotonic()
        write_stderr(f"parallel-sgd: {launch.line()}")
        assert request.ranks is not None
        shared = Path.cwd() if self._judged and self._hosts.elsewhere else None
        training = request.ranks - (request.spares or 0) if request.survive else None
        here, prints = not self._hosts.elsewhere, not _keeps_output_apart(request)
        with Supervisor(request.ranks, shared, training=training, here=here, prints=prints) as roll:
            environ = {**self._environ, **launch.environ, **roll.environ}
            nothing = subprocess.DEVNULL  # mpiexec would read, or stop for, what is the user's
            end = run_job(launch.command, environ, self._deadline, roll, signals, stdin=nothing)
            code, outcome = end.code, judge(end.code, roll, survive=request.survive)
            stopped = bool(signals.ending) or code == TIMED_OUT
            if outcome.end is Ending.COMPLETE and self._judged and not stopped:
                self._tell_of_doubt(code, outcome)
            gone = None if request.survive else roll.gone_without_a_word()
            gone = gone and gone + why_by_code(code)
            if end.killed and outcome.end is Ending.LOST:  # what the ranks died of, too
                outcome, gone = replace(outcome, why=end.killed), end.killed
            if lost := lost_output():
                if outcome.end is Ending.LOST and code == _MPICH_ITSELF:
                    outcome, gone = replace(outcome, why=lost), lost
                elif outcome.end is Ending.COMPLETE:
                    write_stderr(f"parallel-sgd: {lost}")
            elif outcome.end is Ending.LOST and code == _OPEN_MPI_ITSELF and is_unread():
                outcome, gone = replace(outcome, why=_UNREAD), _UNREAD
            seconds = time.monotonic() - began
            asked = bool(signals.notices) or roll.asked()
            return Attempt(code, outcome, seconds, roll.newest_checkpoint(), gone, stopped, asked)

    def _tell_of_doubt(self, code: int, outcome: Outcome) -> None:
        """Of a complete job, where mpiexec alone says that it is, or says that it is not."""
        if not outcome.told:
            why = outcome.why or f"do all hosts share {str(Path.cwd())!r}?"
            write_stderr(
                f"parallel-sgd: no rank could say whether it is complete ({why}): that is "
                "mpiexec's word alone"
            )
        elif code != 0 and not self._request.survive:  # which loses ranks, and says so
            write_stderr(
                "parallel-sgd: complete: all ranks have come to the end of the program; only after "
                f"that has something ended mpiexec with exit code {code}"
            )

    def _may_go_on(self, attempt: Attempt) -> bool:
        """Whether a job has been lost for which restarts were asked; tells what there is to tell of
        its end."""
        lost = attempt.outcome.end is Ending.LOST
        if lost and attempt.gone and not attempt.stopped:
            write_stderr(f"parallel-sgd: error: {attempt.gone}")
        at_start = attempt.outcome.at_start
        if lost and self._request.survive and not attempt.stopped and not at_start:
            write_stderr(f"parallel-sgd: error: not complete: {attempt.outcome.why}")
        if attempt.outcome.end is Ending.FAILED and self._request.restarts:
            write_stderr(
                "parallel-sgd: the program has failed by itself, and would do so again: no restart"
            )
        may = not attempt.stopped and not attempt.asked
        return lost and may and (self._request.restarts > 0 or at_start)

    def _left(self) -> int:
        """The end of a job that was asked to leave, and was lost before its ranks could do so."""
        write_stderr(
            "parallel-sgd: asked to leave: the job was lost before it had saved its state; the "
            "newest checkpoint is what it can go on from"
        )
        if self._request.requeue:
            requeue()
        return PREEMPTED

    def _exit_code(self, attempt: Attempt | None) -> int:
        if attempt is None:
            return os.EX_UNAVAILABLE
        if attempt.outcome.end is Ending.PREEMPTED:
            return PREEMPTED
        if attempt.outcome.end is Ending.COMPLETE and not attempt.stopped:
            return 0 if self._judged else attempt.code
        return attempt.code or 1

    def _why_not_again(self, attempt: Attempt | None) -> str | None:
        """Why the job is not started again, after one more start."""
        new = attempt is not None and attempt.checkpoint not in (None, self._checkpoint)
        if attempt is not None and new:
            self._checkpoint = attempt.checkpoint
        at_start = attempt is not None and attempt.outcome.at_start
        self._lost_at_start = self._lost_at_start + 1 if at_start else 0
        if at_start:
            in_a_row = f"{IN_VAIN} times in a row before anything was trained on: no further start"
            return in_a_row if self._lost_at_start >= IN_VAIN else None
        if attempt is not None:  # else nothing was started
            fruitless = not new and attempt.seconds < SOON_S
            self._fruitless = self._fruitless + 1 if fruitless else 0
            self._waits = self._waits if fruitless else 0
        if self._done >= self._request.restarts:
            return f"all {self._request.restarts} restarts are used up"
        if self._fruitless >= IN_VAIN:
            return (
                f"the last {IN_VAIN} starts were over within {SOON_S:g} s each, without a new "
                "checkpoint: no further restart"
            )
        return None

    def _from(self) -> str:
        """What a restart goes on from, as far as this process has heard."""
        if self._checkpoint is None:
            return "where this command has begun: it has written no checkpoint"
        return f"checkpoint {self._checkpoint!r}"

    def _pause(self, seconds: float, signals: Signals) -> None:
        """Wait, unless all is over."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_over(signals):
            time.sleep(_LOOKS_EVERY_S)

    def _is_over(self, signals: Signals) -> bool:
        """Whether nothing may be started any more."""
        late = self._deadline is not None and self._deadline.is_over
        return bool(signals.ending or signals.notices) or late

    def _ended(self, signals: Signals) -> int:
        """The exit code where all is over between two starts."""
        if signals.ending:
            return 128 + signals.ending[0]
        if signals.notices:
            return self._left()
        assert self._deadline is not None
        write_stderr(f"parallel-sgd: error: {self._deadline.told}")
        return TIMED_OUT


def _keeps_output_apart(request: Request) -> bool:
    """Whether what ranks print goes to files of their own, to which their errors belong."""
    given = " ".join(request.mpiexec_options)
    return request.log_dir is not None or any(words in given for words in _OUTPUT_OPTIONS)


def lost_output() -> str | None:
    """That standard output takes nothing, in a line; None where it does, as far as can be told
    without writing to it."""
    try:
        os.write(1, b"")  # as /dev/full says
        status = os.fstat(1)
        full = stat.S_ISREG(status.st_mode) and os.fstatvfs(1).f_bavail == 0
        why = os.strerror(errno.ENOSPC) if full else None
    except OSError as error:
        why = error.strerror if error.errno in DISK_FULL else None
    return why and f"standard output takes nothing ({why}): what ranks print there is lost"


def is_unread() -> bool:
    """Whether standard output is a pipe, or the like, whose reader is gone (`| head`)."""
    output = select.poll()
    output.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in output.poll(0))


def why_by_code(code: int) -> str:
    """What mpiexec's exit code adds to a line on a rank that was gone without a word."""
    if code == 1:
        return f". {_BY_ONE}"
    number = code - 128 if code > 128 else code  # Open MPI's, and MPICH's
    known = _BY_SIGNAL.get(number)
    return f". Exit code {code} is that of {signal.Signals(number).name}: {known}" if known else ""


def job_variables(request: Request, environ: Mapping[str, str]) -> dict[str, str]:
    """What tells the ranks that their job may be started again, by this launcher or by Slurm: its
    name, and how often it was. Nothing where neither was asked for."""
    if not (request.restarts or request.requeue):
        return {}
    requeued = environ.get("SLURM_RESTART_COUNT", "")
    before = int(requeued) if requeued.isdecimal() else restarts(environ)
    name = environ.get(JOB) or _new_name(request.command, environ)
    return {JOB: name, RESTART: str(before + request.restart)}


def _new_name(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """A job of Slurm's keeps its number when it is requeued; the commands of its script are told
    apart by what they are, and where."""
    slurm = environ.get("SLURM_JOB_ID")
    if not slurm:
        return time.strftime(f"%Y-%m-%d-%H%M%S-{os.getpid()}")
    words = zlib.crc32("\0".join([os.getcwd(), *command]).encode(errors="surrogateescape"))
    return f"slurm-{slurm}-{words:08x}"
