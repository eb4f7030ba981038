"""Run a job, and restart it if it is lost: `parallel-sgd run --restarts N`.

A fault-tolerant job lost before any training is started again without being asked.

The ranks report how their job has ended (`outcome`). A job that ends with an error of the program
would fail again, and is not restarted. A restarted job goes on from its newest complete checkpoint,
found by the name of the job (`training.session`).
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
from .failure_policy import failure_policy
from .job import TIMED_OUT, Deadline, Signals, caught_signals, run_job
from .options import TORCHRUN, Request
from .outcome import Ending, Outcome, judge
from .reachable_hosts import Hosts
from .supervisor import Supervisor

PREEMPTED = os.EX_TEMPFAIL  #: exit code 75: all state is saved, and the job can be started again

#: A start is fruitless if it ends within `FRUITLESS_S` without a new checkpoint. After
#: `MAX_FRUITLESS` of these in a row there is no further restart.
FRUITLESS_S, MAX_FRUITLESS = 60.0, 3

#: Likely causes of the signals that end a rank.
_SIGNAL_HINTS: Mapping[int, str] = {
    signal.SIGBUS: "shared memory may be full (df /dev/shm; in a container: --shm-size)",
    signal.SIGTERM: "somebody has ended the rank, or mpiexec, which then ends all ranks",
}

#: Options of Open MPI's and MPICH's mpiexec that send the ranks' output to files.
_OUTPUT_OPTIONS = ("--output", "errfile-pattern")

#: Open MPI's mpiexec exits with 1 if it is ended itself. If the kernel kills a rank for its memory,
#: the exit code is that of SIGKILL.
_EXIT_CODE_1_HINT = (
    "Exit code 1: the rank was not killed for its memory. It has called os._exit or MPI_Abort, or "
    "somebody has ended the rank, or mpiexec, which then ends all ranks"
)

#: Exit code of MPICH's mpiexec for an error of its own, such as output that cannot be written.
_MPICH_OWN_FAILURE = 255

#: The same for Open MPI's mpiexec, such as a pipe without a reader: it ignores SIGPIPE.
_OPEN_MPI_OWN_FAILURE = 1

_NO_READER = "mpiexec has ended the job: nobody reads its output"

TOO_FEW_HOSTS = "too few hosts answer"

_POLL_INTERVAL_S = 0.05


class Launch(Protocol):
    """A command, with the variables to add to its environment."""

    @property
    def command(self) -> tuple[str, ...]: ...

    @property
    def environ(self) -> Mapping[str, str]: ...

    def line(self) -> str: ...


@dataclass
class Attempt:
    """The result of a single start of a job."""

    code: int
    outcome: Outcome
    seconds: float
    checkpoint: str | None  #: the newest checkpoint written in this start
    error: str | None  #: a line about the cause of a loss, if known
    stopped: bool  #: True if this process has ended the job
    asked_to_leave: bool  #: True if this process or a rank has received a preemption notice


class Restarts:
    """Runs a job, and restarts it as requested.

    Args:
        request: the user's request.
        plan: a function that makes the launch for a request; may raise a UserError.
        hosts: the hosts of the job; unreachable hosts may be skipped.
        environ: the environment of the ranks, without the launch's own variables.
        first_pause_s: pause before the first restart, doubled for each fruitless start in a row.
        longest_pause_s: longest pause before a restart.
    """

    def __init__(
        self,
        request: Request,
        plan: Callable[[Request], Launch],
        hosts: Hosts,
        environ: Mapping[str, str],
        *,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 30.0,
    ) -> None:
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._request, self._plan, self._hosts, self._environ = request, plan, hosts, environ
        self._restarts_done = self._fruitless = self._restart_waits = self._starts_failed = 0
        self._newest_checkpoint: str | None = None
        self._deadline = Deadline.after(request.timeout_s)
        self._policy = failure_policy(request)
        self._judged_by_reports = bool(request.restarts or request.survive)

    def run(self) -> int:
        """Run the job, with its restarts, and return the exit code.

        0: complete. 75: the job has left after a preemption notice. 124: the job has exceeded its
        time limit. 128 + the signal received by this process. Otherwise the job's own exit code, or
        1 if that is 0 and the job is not complete.
        """
        notices = chosen_signals(self._request.preempt_on) if self._request.preempt_on else ()
        with caught_signals(notices) as signals:
            request: Request | None = self._request
            while True:
                attempt = None if request is None else self._attempt(request, signals)
                if attempt is not None and not self._should_restart(attempt):
                    asked_to_leave = attempt.asked_to_leave and not attempt.stopped
                    lost = attempt.outcome.end is Ending.LOST
                    return (
                        self._exit_while_leaving()
                        if asked_to_leave and lost
                        else self._exit_code(attempt)
                    )
                why = attempt.outcome.why if attempt else TOO_FEW_HOSTS
                if problem := self._reason_to_stop(attempt):
                    write_stderr(f"parallel-sgd: error: {why}; {problem}")
                    return self._exit_code(attempt)
                pause = self._first_pause_s * 2 ** min(self._restart_waits, 10)
                pause = min(pause, self._longest_pause_s)
                self._restart_waits += 1
                if self._starts_failed:
                    what = f"nothing was trained yet, so the job starts again in {pause:g} s"
                else:
                    self._restarts_done += 1
                    what = f"restart {self._restarts_done} of {self._request.restarts} "
                    what += f"in {pause:g} s, from {self._resume_point()}"
                write_stderr(f"parallel-sgd: {why}: {what}")
                self._wait_before_restart(pause, signals)
                if not self._must_stop(signals):
                    request = self._hosts.with_reachable_hosts(self._request)  # may take seconds
                if self._must_stop(signals):
                    return self._exit_code_between_starts(signals)

    def _attempt(self, request: Request, signals: Signals) -> Attempt:
        """Start the job once, and return the result."""
        launch, began = self._plan(replace(request, restart=self._restarts_done)), time.monotonic()
        write_stderr(f"parallel-sgd: {launch.line()}")
        assert request.ranks is not None
        shared = Path.cwd() if self._judged_by_reports and self._hosts.any_remote else None
        training = self._policy.recovering_ranks(request)
        local, prints = not self._hosts.any_remote, not _has_output_files(request)
        with Supervisor(
            request.ranks,
            shared,
            training=training,
            local=local,
            prints=prints,
            launcher=request.launcher,
        ) as supervisor:
            environ = {**self._environ, **launch.environ, **supervisor.environ}
            end = run_job(
                launch.command,
                environ,
                self._deadline,
                supervisor,
                signals,
                stdin=subprocess.DEVNULL,  # mpiexec must not read the user's input, or stop for it
            )
            code = end.code
            judged = judge(supervisor.job_status(code), survive=request.survive)
            stopped = bool(signals.ending) or code == TIMED_OUT
            if judged.end is Ending.COMPLETE and self._judged_by_reports and not stopped:
                self._warn_if_uncertain(code, judged)
            error = self._policy.error_line(supervisor)
            by_torchrun = request.launcher == TORCHRUN  # its code for any failure is 1
            error = error and error + ("" if by_torchrun else exit_code_hint(code))
            if judged.end is Ending.COMPLETE and (problem := stdout_problem()):
                write_stderr(f"parallel-sgd: {problem}")
            if judged.end is Ending.LOST and (
                cause := end.killed or (None if by_torchrun else _output_failure(code))
            ):
                judged, error = replace(judged, why=cause), cause  # of the ranks' failure, too
            seconds, checkpoint = time.monotonic() - began, supervisor.newest_checkpoint()
            asked_to_leave = bool(signals.notices) or supervisor.was_asked_to_leave()
            return Attempt(code, judged, seconds, checkpoint, error, stopped, asked_to_leave)

    def _warn_if_uncertain(self, code: int, outcome: Outcome) -> None:
        """Warn about a complete job if no rank has reported, or mpiexec's exit code disagrees."""
        if not outcome.reported:
            why = outcome.why or f"do all hosts share {str(Path.cwd())!r}?"
            write_stderr(
                f"parallel-sgd: no rank could report whether the job is complete ({why}): only "
                f"{self._request.launcher}'s exit code says so"
            )
        elif not self._policy.expects(code):
            write_stderr(
                "parallel-sgd: complete: all ranks have finished the program; "
                f"{self._request.launcher} has ended with exit code {code} only after that"
            )

    def _should_restart(self, attempt: Attempt) -> bool:
        """Return True if the job was lost and restarts were requested.

        Print messages about the end.
        """
        lost = attempt.outcome.end is Ending.LOST
        if lost and attempt.error and not attempt.stopped:
            write_stderr(f"parallel-sgd: error: {attempt.error}")
        at_start = attempt.outcome.at_start
        line = self._policy.loss_line(attempt.outcome.why)
        if lost and line and not attempt.stopped and not at_start:
            write_stderr(f"parallel-sgd: error: {line}")
        if attempt.outcome.end is Ending.FAILED and self._request.restarts:
            write_stderr(
                "parallel-sgd: the program has failed with an error, and would fail again: no "
                "restart"
            )
        may = not attempt.stopped and not attempt.asked_to_leave
        return lost and may and (self._request.restarts > 0 or at_start)

    def _exit_while_leaving(self) -> int:
        """Return the exit code of a job lost after a preemption notice, before saving its state.

        Requeue the job if requested.
        """
        write_stderr(
            "parallel-sgd: asked to leave: the job has failed before it had saved its state; it "
            "can resume from its newest checkpoint"
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
            return 0 if self._judged_by_reports else attempt.code
        return attempt.code or 1

    def _reason_to_stop(self, attempt: Attempt | None) -> str | None:
        """Return the reason not to restart the job again, or None. Count the fruitless starts."""
        new = attempt is not None and attempt.checkpoint not in (None, self._newest_checkpoint)
        if attempt is not None and new:
            self._newest_checkpoint = attempt.checkpoint
        at_start = attempt is not None and attempt.outcome.at_start
        self._starts_failed = self._starts_failed + 1 if at_start else 0
        if at_start:
            in_a_row = f"{MAX_FRUITLESS} times in a row before any training: no further start"
            return in_a_row if self._starts_failed >= MAX_FRUITLESS else None
        if attempt is not None:  # None: nothing was started
            fruitless = not new and attempt.seconds < FRUITLESS_S
            self._fruitless = self._fruitless + 1 if fruitless else 0
            self._restart_waits = self._restart_waits if fruitless else 0
        if self._restarts_done >= self._request.restarts:
            return f"all {self._request.restarts} restarts are used up"
        if self._fruitless >= MAX_FRUITLESS:
            return (
                f"the last {MAX_FRUITLESS} starts ended within {FRUITLESS_S:g} s each, without a "
                "new checkpoint: no further restart"
            )
        return None

    def _resume_point(self) -> str:
        """Describe the checkpoint from which a restart goes on, if known to this process."""
        if self._newest_checkpoint is None:
            return "the state in which this command began: it has written no checkpoint"
        return f"checkpoint {self._newest_checkpoint!r}"

    def _wait_before_restart(self, seconds: float, signals: Signals) -> None:
        """Wait, or return early if no further start is allowed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._must_stop(signals):
            time.sleep(_POLL_INTERVAL_S)

    def _must_stop(self, signals: Signals) -> bool:
        """Return True if no further start is allowed."""
        late = self._deadline is not None and self._deadline.is_past
        return bool(signals.ending or signals.notices) or late

    def _exit_code_between_starts(self, signals: Signals) -> int:
        """Return the exit code if the job ends between two starts."""
        if signals.ending:
            return 128 + signals.ending[0]
        if signals.notices:
            return self._exit_while_leaving()
        assert self._deadline is not None
        write_stderr(f"parallel-sgd: error: {self._deadline.message}")
        return TIMED_OUT


def _has_output_files(request: Request) -> bool:
    """Return True if the output of ranks goes to files of their own, and so do their errors."""
    given = " ".join(request.mpiexec_options)
    return request.log_dir is not None or any(words in given for words in _OUTPUT_OPTIONS)


def stdout_problem() -> str | None:
    """Return an error line if standard output accepts nothing, or None.

    Determined without writing, as far as possible: a full disk, or /dev/full.
    """
    try:
        os.write(1, b"")  # /dev/full refuses this
        status = os.fstat(1)
        full = stat.S_ISREG(status.st_mode) and os.fstatvfs(1).f_bavail == 0
        why = os.strerror(errno.ENOSPC) if full else None
    except OSError as error:
        why = error.strerror if error.errno in DISK_FULL else None
    return why and f"standard output cannot be written ({why}): the output of the ranks is lost"


def stdout_has_no_reader() -> bool:
    """Return True if standard output is a pipe, or similar, without a reader (`| head`)."""
    output = select.poll()
    output.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in output.poll(0))


def _output_failure(code: int) -> str | None:
    """Return an error line if mpiexec has ended because of its standard output, or None."""
    if problem := stdout_problem():
        return problem if code == _MPICH_OWN_FAILURE else None
    return _NO_READER if code == _OPEN_MPI_OWN_FAILURE and stdout_has_no_reader() else None


def exit_code_hint(code: int) -> str:
    """Explain mpiexec's exit code, to follow the error line about a rank that exited silently."""
    if code == 1:
        return f". {_EXIT_CODE_1_HINT}"
    number = code - 128 if code > 128 else code  # Open MPI's code, or MPICH's
    known = _SIGNAL_HINTS.get(number)
    return f". Exit code {code} is that of {signal.Signals(number).name}: {known}" if known else ""


def job_variables(request: Request, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for ranks of a job that may be restarted, by this launcher or by Slurm.

    The name of the job, and the number of restarts so far. Empty if neither restarts nor requeueing
    was requested.
    """
    if not (request.restarts or request.requeue):
        return {}
    requeued = environ.get("SLURM_RESTART_COUNT", "")
    before = int(requeued) if requeued.isdecimal() else restarts(environ)
    name = environ.get(JOB) or _new_name(request.command, environ)
    return {JOB: name, RESTART: str(before + request.restart)}


def _new_name(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return a name for the job.

    A Slurm job keeps its id when requeued. The commands of a Slurm script are distinguished by a
    checksum of the command and its folder.
    """
    slurm = environ.get("SLURM_JOB_ID")
    if not slurm:
        return time.strftime(f"%Y-%m-%d-%H%M%S-{os.getpid()}")
    words = zlib.crc32("\0".join([os.getcwd(), *command]).encode(errors="surrogateescape"))
    return f"slurm-{slurm}-{words:08x}"
