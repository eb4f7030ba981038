"""What the ranks of a job tell of themselves, and which is gone first, as `parallel-sgd run` sees
it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
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
from ..communication.liveness.rank_status import (
    ALL_FINISHED,
    BEGUN,
    CHECKPOINT,
    END_STATUSES,
    FAILED,
    FINISHED,
    LOST,
    ON,
    OVER,
    PREEMPTION_REQUESTED,
    PROCESS,
)
from ..communication.phrases import in_words
from ..communication.timeouts import TIMEOUT_S
from .cleanup import MPIEXEC, locked_folder, remove, remove_leftovers
from .rank_errors import RankErrors
from .startup import StartupMonitor
from .status_pipes import Note, Notes

#: How many descriptors the launcher needs besides one for each rank.
_SPARE = 64

#: A job of which a rank has said that it fails ends within so many seconds, or is ended.
_ENDS_S = 20.0

#: How often the launcher looks what the ranks do. Where it was stopped itself that does not count.
_LOOKS_EVERY_S = 1.0

#: A process that has closed its pipe as it ends is gone after so many seconds.
_DIES_S = 0.2

#: How long the kernel may take to end killed ranks.
_ENDING_S = 10.0


class Supervisor:
    """The folder in which the ranks sign on and off. A `with` block of one job.

    Each rank holds the writing end of a pipe for as long as it lives, and the kernel keeps the
    order in which those ends are closed. That comes before mpiexec hears of a rank's end and kills
    the others; the end of a process itself, as process descriptors tell it, may come after.

    Args:
        ranks: how many the job has, here and elsewhere.
        shared: where to make the folder so that ranks on other hosts find it, too; None: those
            cannot tell anything.
        training: so many of them, the first ones, train, and survive each other once they have made
            a learner; None: the job ends with the first one that dies.
        here: whether it is known that all of them are on this host.
        prints: whether to print their errors: once what several ranks say.

    Where some of them are on other hosts nobody is named: a rank there may have ended the job.
    """

    def __init__(
        self,
        ranks: int,
        shared: Path | None = None,
        *,
        training: int | None = None,
        here: bool = False,
        prints: bool = False,
    ) -> None:
        self.ranks, self._shared, self._training, self._here = ranks, shared, training, here
        self._prints, self._errors = prints, RankErrors(ranks)
        self._start: StartupMonitor | None = None
        self._pipes: dict[int, int] = {}  # ranks, by the descriptor of their pipe
        self._gone: list[int] = []  # in that order
        self._replaced: set[int] = set()  # who has another program now
        self._heartbeat_table: HeartbeatTable | None = None
        self._looked, self._polled_s = time.monotonic(), time.time()
        self._failed_s = self._stopped_s = self._gone_s = 0.0  # for how long a rank has, or all are
        self._killed: int | None = None  # who was gone before any rank had said what is wrong
        self.all_stopped: str | None = None  #: that the job is ended for that, in a line

    def __enter__(self) -> Supervisor:
        remove_leftovers(self._shared)
        here = self._shared is None
        self._make_folder()
        self._notes = Notes(self._folder)
        if self._training is not None:
            self._start = StartupMonitor(self._notes, self.ranks, self._training, here=here)
        self.environ = {FOLDER: str(self._folder)}  #: for the ranks
        if self._prints:
            self.environ[ERRORS] = "1"
        self._ends = select.epoll()
        if self.ranks + _SPARE <= os.sysconf("SC_OPEN_MAX"):
            self._watch()
        return self

    def _make_folder(self) -> None:
        if self._shared is not None:
            with contextlib.suppress(OSError):  # it cannot be written to, or has no locks
                self._folder, self._lock = locked_folder(self._shared.resolve())
                return
        self._shared = None
        self._folder, self._lock = locked_folder()

    def _watch(self) -> None:
        """Make a pipe for each rank; none where there cannot be one for each."""
        try:
            for rank in range(self.ranks):
                path = self._folder / f"{rank}.{PROCESS}"
                os.mkfifo(path)
                pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._pipes[pipe] = rank
                self._ends.register(pipe, select.EPOLLHUP | select.EPOLLONESHOT)
            if self._shared is None:  # a board is of one host, and its ranks make one themselves
                self._heartbeat_table = make_heartbeat_table(self._folder / FILE, self.ranks)
        except OSError:
            self._close_pipes()

    def look(self) -> None:
        """Take in who is gone since the last look, in that order. To be called every now and then:
        the kernel puts a pipe that is opened in line, too, until it has been looked at."""
        if not self._pipes:
            return
        since_s, self._polled_s = self._polled_s, time.time()
        closed = [self._pipes[pipe] for pipe, _ in self._ends.poll(0, self.ranks)]
        self._notes.take_in(self._pipes)  # also what those have said before
        self._errors.take(self._notes.errors())
        gone = [rank for rank in closed if not self._lives_on(rank)]
        if not gone:
            return
        self._gone += gone
        said = self.said()
        if self._start is not None:
            processes = {rank: f"pid {self._process(rank)}" for rank in gone}
            self._start.note_gone(processes, said, since_s)
        silent = [rank for rank in gone if rank not in said]
        if silent and self._killed is None and not self._may_be_a_consequence():
            self._killed = silent[0]

    def print_errors(self) -> None:
        """Print what errors of the ranks are left. To be called when the job has ended."""
        self.look()
        self._errors.print_rest()

    def _lives_on(self, rank: int) -> bool:
        """Whether the process of a rank that has closed its pipe is still there: it has replaced
        its program (os.execv) by one that does not say anything any more."""
        process = self._process(rank)
        until = time.monotonic() + _DIES_S
        while process and is_running(int(process)):
            if time.monotonic() > until:
                self._replaced.add(rank)
                return True
            time.sleep(0.001)
        return False

    def note_mpiexec(self, pid: int) -> None:
        """It has started: the next launcher removes what it leaves, if this one is killed."""
        with contextlib.suppress(OSError):  # a full disk, say
            (self._folder / MPIEXEC).write_text(str(pid))

    @property
    def all_here(self) -> bool:
        """Whether all ranks have signed on on this host, as far as can be told. Local."""
        return bool(self._pipes) and all(map(self._process, self._pipes.values()))

    def _may_be_a_consequence(self) -> bool:
        """Whether a rank has said what is wrong, and by now may have ended the others for it. It
        waits for `GRACE_S` before: what is gone until then had no time to. What ranks elsewhere
        say may be late, or never come here."""
        now = time.time()
        told = [note.time_s for note in self._told(FAILED, LOST)]
        return not self.all_here or any(not 0 <= now - time_s < GRACE_S for time_s in told)

    def said(self) -> dict[int, str]:
        """Why ranks have ended, by rank, of those that have said it; the first word of each."""
        return {note.rank: note.what for note in reversed(self._told(*END_STATUSES))}

    @property
    def all_left(self) -> bool:
        """Whether all ranks have come to the end of the program."""
        said = self.said()
        return len(said) == self.ranks and {*said.values()} == {FINISHED}

    def asked(self) -> bool:
        """Whether any rank was asked to leave, as far as can be told."""
        return bool(self._told(PREEMPTION_REQUESTED))

    def seen(self) -> set[int]:
        """Ranks that have signed on, as far as can be told, and may say how they end."""
        return {note.rank for note in self._told(ON)} - self._replaced

    @property
    def is_deaf(self) -> bool:
        """Whether ranks may have said something that does not reach this process: its folder is
        gone, and not all hold a pipe."""
        return not self.all_here and not self._notes.folder_is_there

    @property
    def folder(self) -> Path:
        return self._notes.folder

    def together(self) -> bool:
        """Whether a rank has seen all others come to their end."""
        return bool(self._told(ALL_FINISHED))

    def unfinished(self) -> bool:
        """Whether some work of all ranks was begun, and nobody is left who brought it to its
        end."""
        begun, over = (
            {note.what.partition(".")[0] for note in self._told(what)} for what in (BEGUN, OVER)
        )
        return not begun <= over

    def newest_checkpoint(self) -> str | None:
        """That was written in this job; None where there is none, or it cannot be told."""
        told = self._told(CHECKPOINT)
        return told[-1].text or None if told else None

    def killed(self) -> str | None:
        """Which rank was gone without a word before any had said what is wrong, in a few words."""
        self.look()
        if self._killed is None:
            return None
        return f"rank {self._killed} (pid {self._process(self._killed)}) was gone without a word"

    @property
    def lost_at_start(self) -> str | None:
        """Which rank was gone without a word while those that survive each other did not yet do so,
        in a few words."""
        return None if self._start is None else self._start.lost

    def does_not_end(self) -> str | None:
        """Why the job has to be ended, in a line, where no rank can do that; None where it goes on.
        To be asked every now and then."""
        now = time.monotonic()
        if now - self._looked < _LOOKS_EVERY_S:
            return None
        self._looked = now
        if self._start is not None:
            self._start.look(now, self.said())
        if self.lost_at_start is not None:
            return self.lost_at_start
        failed = {FAILED, LOST} & {*self.said().values()}
        self._failed_s = self._failed_s + _LOOKS_EVERY_S if failed else 0.0
        if self._failed_s > _ENDS_S:
            return f"a rank has failed, and mpiexec has not ended the job within {_ENDS_S:g} s"
        gone = self.all_here and len(self._gone) == self.ranks
        self._gone_s = self._gone_s + _LOOKS_EVERY_S if gone else 0.0
        if self._gone_s > _ENDS_S:
            return f"all ranks have ended, and mpiexec has not within {_ENDS_S:g} s"
        lines = [] if self._heartbeat_table is None else self._heartbeat_table.lines()
        states = {line.state(now) for line in lines}
        stopped = len(lines) == self.ranks and states - {RankState.EXITED} == {RankState.STOPPED}
        self._stopped_s = self._stopped_s + _LOOKS_EVERY_S if stopped else 0.0
        timeout_s = max((line.timeout_s for line in lines), default=0.0) or TIMEOUT_S
        if self._stopped_s > timeout_s:
            self.all_stopped = (
                f"all ranks have been stopped, for more than timeout_s={timeout_s:g} s"
            )
        return self.all_stopped

    def show_stacks(self) -> None:
        """Have the ranks on this host write where they are, into their logs."""
        lines = [] if self._heartbeat_table is None else self._heartbeat_table.lines()
        reached = [line.signal(SHOW_STACKS) for line in lines]
        if any(reached):
            time.sleep(SHOWN_S)

    def gone_without_a_word(self) -> str | None:
        """Which rank that is, in a line; None where all have signed off, or it cannot be told. To
        be asked when the job has ended."""
        self.look()
        said = self.said()
        if self.all_stopped is not None or {FAILED, LOST} & {*said.values()}:
            return None
        silent = [rank for rank in self._gone if rank not in said]
        if not self.all_here:
            return self._gone_before_signing_on(silent)
        if not silent:
            return None
        return (
            f"rank {silent[0]} (pid {self._process(silent[0])}) was gone first, without a "
            "word: it was killed (for its memory, say), has crashed, or has called os._exit or "
            "MPI_Abort"
        )

    def _gone_before_signing_on(self, silent: Sequence[int]) -> str | None:
        """Those that have not come so far, in a line, as far as that can be told.

        Args:
            silent: who has, and was gone without a word.
        """
        if not self._here or not self._pipes or not self._notes.folder_is_there:
            return None
        names = in_words([rank for rank in self._pipes.values() if not self._process(rank)])
        also = f", and {in_words(silent)} without a word" if silent else ""
        return (
            f"{names} ended before signing on{also}: one of them was killed (for its memory, say), "
            "has crashed, or could not be started"
        )

    def pass_on(self, number: signal.Signals) -> bool:
        """Send a signal to the ranks on this host; whether there is one."""
        self.look()
        there = False
        for rank in self._pipes.values():
            process = self._process(rank)
            if process and rank not in self._gone:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(process), number)
                    there = True
        return there

    def _end_the_rest(self) -> None:
        """See that no rank on this host is left, when mpiexec has ended: it may have been killed
        itself, and a rank be stopped. Waits `_ENDING_S` at most."""
        deadline = time.monotonic() + _ENDING_S
        while self.pass_on(signal.SIGKILL) and time.monotonic() < deadline:
            time.sleep(0.02)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._end_the_rest()
        self.print_errors()
        complete = self.all_left
        self._ends.close()
        self._close_pipes()
        self._notes.close()
        remove(self._folder, self._lock, complete=complete)

    def _told(self, *kinds: str) -> list[Note]:
        """What ranks have told by now of these kinds, the oldest first."""
        self._notes.take_in(self._pipes)
        return self._notes.of(*kinds)

    def _process(self, rank: int) -> str:
        """The number of a rank's process on this host; nothing where none has said it yet."""
        if not self._notes.process(rank):
            self._notes.take_in(self._pipes)
        return self._notes.process(rank)

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()
