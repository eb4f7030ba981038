"""Watch the ranks of a job for `parallel-sgd run`: their reports, and the order of their exits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..communication.job_environment import ERRORS, FOLDER
from ..communication.liveness.abort import GRACE_S
from ..communication.liveness.heartbeat import (
    FILE,
    SHOW_STACKS,
    SHOWN_S,
    HeartbeatTable,
    RankState,
    is_running,
    make_heartbeat_table,
)
from ..communication.liveness.rank_status import END_STATUSES, Status
from ..communication.phrases import in_words
from ..communication.timeouts import TIMEOUT_S
from .cleanup import MPIEXEC, locked_folder, remove, remove_leftovers
from .outcome import JobStatus
from .rank_reports import RankErrors, RankReport, RankReports
from .startup import StartupMonitor

#: Descriptors that the launcher needs in addition to one for each rank.
_OTHER_DESCRIPTORS = 64

#: Longest time between the close of an exiting process's pipe and the end of the process.
_EXIT_TIMEOUT_S = 0.2


@dataclass(frozen=True)
class Waits:
    """Durations of a supervisor's waits.

    Attributes:
        poll_s: between two checks of the ranks. Time while the launcher is stopped is not counted.
        end_s: for mpiexec to end, once a rank has reported a failure or all ranks have exited.
        kill_s: for the kernel to end killed ranks.
    """

    poll_s: float = 1.0
    end_s: float = 20.0
    kill_s: float = 10.0


class Supervisor:
    """Collect the reports of a job's ranks and watch their processes. A `with` block of one job.

    Each rank holds the writing end of a pipe until its process ends. The kernel keeps the order in
    which the pipes are closed. A pipe is closed before mpiexec notices the rank's exit and kills
    the remaining ranks; a process descriptor may report the exit later than that.

    If some ranks run on remote hosts, no rank is named as the first to exit: a remote rank may have
    ended the job.

    Args:
        ranks: the number of ranks of the job, on all hosts.
        shared: a folder shared by all hosts, for the launcher's own folder. None: ranks on remote
            hosts cannot report anything.
        training: the number of ranks in training, the first ones of the job. These recover from
            failures once they have made a learner. None: the first failure ends the job.
        local: True if all ranks are known to run on this host.
        prints: print the ranks' errors, and an error shared by several ranks only once.
        launcher: the name of the program that starts the ranks, for messages.
        waits: how long to wait for ranks and mpiexec.

    Attributes:
        environ: the variables to add to the ranks' environment.
        all_stopped: an error line, if the job was ended because all ranks were stopped (SIGSTOP).
    """

    def __init__(
        self,
        ranks: int,
        shared: Path | None = None,
        *,
        training: int | None = None,
        local: bool = False,
        prints: bool = False,
        launcher: str = "mpiexec",
        waits: Waits | None = None,
    ) -> None:
        self._waits = waits or Waits()
        self.ranks, self._shared, self._training, self._local = ranks, shared, training, local
        self.launcher = launcher
        self._prints, self._rank_errors = prints, RankErrors(ranks)
        self._startup: StartupMonitor | None = None
        self._pipes: dict[int, int] = {}  # rank by descriptor of its pipe
        self._exited: list[int] = []  # in order of exit
        self._with_other_program: set[int] = set()  # ranks that have called exec
        self._heartbeat_table: HeartbeatTable | None = None
        self._last_check, self._polled_s = time.monotonic(), time.time()
        self._failed_s = self._stopped_s = self._all_exited_s = 0.0  # duration of each condition
        self._killed_rank: int | None = None  # exited before any reported failure
        self.all_stopped: str | None = None

    def __enter__(self) -> Supervisor:
        remove_leftovers(self._shared)
        local = self._shared is None
        self._make_folder()
        self._reports = RankReports(self._folder)
        if self._training is not None:
            self._startup = StartupMonitor(self._reports, self.ranks, self._training, local=local)
        self.environ = {FOLDER: str(self._folder)}
        if self._prints:
            self.environ[ERRORS] = "1"
        self._epoll = select.epoll()
        if self.ranks + _OTHER_DESCRIPTORS <= os.sysconf("SC_OPEN_MAX"):
            self._watch()
        return self

    def _make_folder(self) -> None:
        if self._shared is not None:
            with contextlib.suppress(OSError):  # not writable, or without locks
                self._folder, self._lock = locked_folder(self._shared.resolve())
                return
        self._shared = None
        self._folder, self._lock = locked_folder()

    def _watch(self) -> None:
        """Make a pipe for every rank, or none if a pipe cannot be made for every rank."""
        try:
            for rank in range(self.ranks):
                path = self._folder / f"{rank}.{Status.PROCESS}"
                os.mkfifo(path)
                pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._pipes[pipe] = rank
                self._epoll.register(pipe, select.EPOLLHUP | select.EPOLLONESHOT)
            if self._shared is None:  # with remote hosts each host's ranks make their own
                self._heartbeat_table = make_heartbeat_table(self._folder / FILE, self.ranks)
        except OSError:
            self._close_pipes()

    def check(self) -> None:
        """Record the ranks that have exited since the last call, in their order. Call it regularly.

        A pipe opened by a rank is queued by the kernel like a closed pipe, until the next call.
        """
        if not self._pipes:
            return
        since_s, self._polled_s = self._polled_s, time.time()
        closed = [self._pipes[pipe] for pipe, _ in self._epoll.poll(0, self.ranks)]
        self._reports.read_pipes(self._pipes)  # including the last reports of those that exited
        self._rank_errors.take(self._reports.take_errors())
        exited = [rank for rank in closed if not self._has_other_program(rank)]
        if not exited:
            return
        self._exited += exited
        exit_reasons = self.exit_reasons()
        if self._startup is not None:
            processes = {rank: f"pid {self._pid(rank)}" for rank in exited}
            self._startup.record_exits(processes, exit_reasons, since_s)
        silent = [rank for rank in exited if rank not in exit_reasons]
        if silent and self._killed_rank is None and not self._may_follow_from_failure():
            self._killed_rank = silent[0]

    def print_errors(self) -> None:
        """Print all remaining errors of the ranks. Call it when the job has ended."""
        self.check()
        self._rank_errors.print_rest()

    def _has_other_program(self, rank: int) -> bool:
        """Return True if a rank has closed its pipe, but its process still runs.

        Such a rank has replaced its program (os.execv) by a program without reports.
        """
        process = self._pid(rank)
        until = time.monotonic() + _EXIT_TIMEOUT_S
        # bounded: _EXIT_TIMEOUT_S
        while process and is_running(int(process)):
            if time.monotonic() > until:
                self._with_other_program.add(rank)
                return True
            time.sleep(0.001)
        return False

    def record_mpiexec(self, pid: int) -> None:
        """Record mpiexec's process id, for the next launcher to clean up if this one is killed."""
        with contextlib.suppress(OSError):  # for example a full disk
            (self._folder / MPIEXEC).write_text(str(pid))

    @property
    def all_local(self) -> bool:
        """True if all ranks are known to have signed on on this host. Local."""
        return bool(self._pipes) and all(map(self._pid, self._pipes.values()))

    def _may_follow_from_failure(self) -> bool:
        """Return True if an exit may be the consequence of a failure reported by another rank.

        A rank that reports a failure waits `GRACE_S` before it ends the job, so an exit before that
        has another cause. Reports from remote hosts may be late or missing.
        """
        now = time.time()
        reports = [report.time_s for report in self._reports_of(Status.FAILED, Status.LOST)]
        return not self.all_local or any(not 0 <= now - time_s < GRACE_S for time_s in reports)

    def exit_reasons(self) -> dict[int, Status]:
        """Return the reported reason of exit by rank.

        If a rank has reported several, the first counts.
        """
        reports = reversed(self._reports_of(*END_STATUSES))
        return {report.rank: Status(report.kind) for report in reports}

    @property
    def all_finished(self) -> bool:
        """True if all ranks have reached the end of the program."""
        exit_reasons = self.exit_reasons()
        return len(exit_reasons) == self.ranks and {*exit_reasons.values()} == {Status.FINISHED}

    def was_asked_to_leave(self) -> bool:
        """Return True if any rank is known to have received a preemption notice."""
        return bool(self._reports_of(Status.PREEMPTION_REQUESTED))

    def signed_on(self) -> set[int]:
        """Return the ranks known to have signed on and still able to report how they end."""
        return {
            report.rank for report in self._reports_of(Status.STARTED)
        } - self._with_other_program

    @property
    def may_miss_reports(self) -> bool:
        """True if reports may be lost: the folder is gone, and not every rank holds a pipe."""
        return not self.all_local and not self._reports.folder_exists

    @property
    def folder(self) -> Path:
        return self._reports.folder

    def saw_all_finish(self) -> bool:
        """Return True if a rank has seen all ranks reach their end."""
        return bool(self._reports_of(Status.ALL_FINISHED))

    def has_unfinished_session(self) -> bool:
        """Return True if the ranks have begun a training session and no rank has finished it."""
        started, finished = (
            {report.kind.partition(".")[0] for report in self._reports_of(status)}
            for status in (Status.SESSION_BEGUN, Status.SESSION_FINISHED)
        )
        return not started <= finished

    def newest_checkpoint(self) -> str | None:
        """Return the newest checkpoint known to be written in this job, or None."""
        reports = self._reports_of(Status.CHECKPOINT)
        return reports[-1].text or None if reports else None

    def job_status(self, mpiexec_code: int) -> JobStatus:
        """Return all that is known of the job. Call it when mpiexec has ended."""
        self.check()
        return JobStatus(
            ranks=self.ranks,
            launcher=self.launcher,
            mpiexec_code=mpiexec_code,
            end_statuses=self.exit_reasons(),
            signed_on=frozenset(self.signed_on()),
            killed=self.killed_rank(),
            failed_at_start=self.failed_at_start,
            all_stopped=self.all_stopped,
            saw_all_finish=self.saw_all_finish(),
            has_unfinished_session=self.has_unfinished_session(),
            lost_folder=str(self.folder) if self.may_miss_reports else None,
        )

    def killed_rank(self) -> str | None:
        """Describe the rank that exited without a report before any reported failure, or None."""
        self.check()
        if self._killed_rank is None:
            return None
        return (
            f"rank {self._killed_rank} (pid {self._pid(self._killed_rank)}) ended without a report"
        )

    @property
    def failed_at_start(self) -> str | None:
        """Describe the rank that exited without a report before any rank had a learner, or None."""
        return None if self._startup is None else self._startup.failure

    def reason_to_end(self) -> str | None:
        """Return an error line if the job has to be ended from here, or None. Call it regularly."""
        now = time.monotonic()
        if now - self._last_check < self._waits.poll_s:
            return None
        self._last_check = now
        if self._startup is not None:
            self._startup.check(now, self.exit_reasons())
        if self.failed_at_start is not None:
            return self.failed_at_start
        failed = {Status.FAILED, Status.LOST} & {*self.exit_reasons().values()}
        self._failed_s = self._failed_s + self._waits.poll_s if failed else 0.0
        if self._failed_s > self._waits.end_s:
            return (
                f"a rank has failed, and {self.launcher} has not ended the job within "
                f"{self._waits.end_s:g} s"
            )
        exited = self.all_local and len(self._exited) == self.ranks
        self._all_exited_s = self._all_exited_s + self._waits.poll_s if exited else 0.0
        if self._all_exited_s > self._waits.end_s:
            limit = f"{self._waits.end_s:g} s"
            return f"all ranks have ended, and {self.launcher} has not within {limit}"
        lines = [] if self._heartbeat_table is None else self._heartbeat_table.heartbeats()
        states = {line.state(now) for line in lines}
        stopped = len(lines) == self.ranks and states - {RankState.EXITED} == {RankState.STOPPED}
        self._stopped_s = self._stopped_s + self._waits.poll_s if stopped else 0.0
        timeout_s = max((line.timeout_s for line in lines), default=0.0) or TIMEOUT_S
        if self._stopped_s > timeout_s:
            self.all_stopped = (
                f"all ranks have been stopped, for more than timeout_s={timeout_s:g} s"
            )
        return self.all_stopped

    def show_stacks(self) -> None:
        """Make the ranks on this host write their stacks into their logs."""
        lines = [] if self._heartbeat_table is None else self._heartbeat_table.heartbeats()
        reached = [line.signal(SHOW_STACKS) for line in lines]
        if any(reached):
            time.sleep(SHOWN_S)

    def silent_exit_line(self) -> str | None:
        """Return an error line about the first rank to exit without a report, or None if unknown.

        None also if all ranks have reported. Call it when the job has ended.
        """
        self.check()
        exit_reasons = self.exit_reasons()
        if self.all_stopped is not None or {Status.FAILED, Status.LOST} & {*exit_reasons.values()}:
            return None
        silent = [rank for rank in self._exited if rank not in exit_reasons]
        if not self.all_local:
            return self._exit_before_sign_on_line(silent)
        if not silent:
            return None
        return (
            f"rank {silent[0]} (pid {self._pid(silent[0])}) ended first, without a report: it was "
            "killed (for its memory, say), has crashed, or has called os._exit or MPI_Abort"
        )

    def _exit_before_sign_on_line(self, silent: Sequence[int]) -> str | None:
        """Return an error line about the ranks that have not signed on, or None if unknown.

        Args:
            silent: the ranks that have signed on and exited without a report.
        """
        if not self._local or not self._pipes or not self._reports.folder_exists:
            return None
        names = in_words([rank for rank in self._pipes.values() if not self._pid(rank)])
        also = f", and {in_words(silent)} without a report" if silent else ""
        return (
            f"{names} ended before signing on{also}: one of them was killed (for its memory, say), "
            "has crashed, or could not be started"
        )

    def send_signal(self, number: signal.Signals) -> bool:
        """Send a signal to the ranks on this host. Return True if there is such a rank."""
        self.check()
        found = False
        for rank in self._pipes.values():
            process = self._pid(rank)
            if process and rank not in self._exited:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(process), number)
                    found = True
        return found

    def _kill_remaining(self) -> None:
        """Kill the ranks left on this host after mpiexec's end. Wait up to `Waits.kill_s`.

        mpiexec may have been killed itself, and a rank may be stopped.
        """
        deadline = time.monotonic() + self._waits.kill_s
        while self.send_signal(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.02)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._kill_remaining()
        self.print_errors()
        complete = self.all_finished
        self._epoll.close()
        self._close_pipes()
        self._reports.close()
        remove(self._folder, self._lock, complete=complete)

    def _reports_of(self, *kinds: Status) -> list[RankReport]:
        """Return all reports of these kinds so far, the oldest first."""
        self._reports.read_pipes(self._pipes)
        return self._reports.of_kinds(*kinds)

    def _pid(self, rank: int) -> str:
        """Return the process id of a rank on this host, or "" if the rank has not reported."""
        if not self._reports.pid(rank):
            self._reports.read_pipes(self._pipes)
        return self._reports.pid(rank)

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()
