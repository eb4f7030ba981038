"""Status queries: a rank asks all ranks for their state after a timeout, before it ends the job.

    rank with a timeout       -> all ranks    "how many collectives on communicator 0?"
    watchdog of each rank     -> that rank    "16 collectives, computing"

Each queried rank also writes its stacks to its own log. A rank without a reply is stopped, cut off,
or holds Python's lock. Ranks on its host can tell which, and make a process holding the lock write
its stacks anyway (`heartbeat`).

A finished rank uses the same query to check the remaining ranks: they may continue for any time,
but must reply. Everything here is local.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from ..phrases import in_words
from ..stderr import write_stderr
from . import finish, heartbeat
from .abort import SCAFFOLD, end_job, print_labelled, user_location
from .heartbeat import ANSWERING, Heartbeat
from .rank_status import Status, report_status

if TYPE_CHECKING:
    from mpi4py import MPI

    from .finish import FinishProtocol

_QUESTION, _ANSWER = 2, 3  #: tags, different from those of `finish`

_SKIPPED = {*SCAFFOLD, __file__}

ANSWERED_S = 1.5  #: a rank with a running watchdog thread has answered by then
_SAME_CAUSE_S = 5.0  #: queries within this time have the same cause
_ASKS_S = 0.5  #: shortest interval between two queries of a finished rank to a rank


@dataclass(frozen=True)
class StatusReport:
    """Status of a rank, and of unresponsive ranks on its host.

    Attributes:
        rank: world rank.
        collective_counts: collectives entered on the queried communicator; None if unknown there.
        does: activity in words.
        mates: activities of unresponsive ranks on the same host, in words, by rank.
    """

    rank: int
    collective_counts: int | None
    does: str
    mates: dict[int, str] = field(default_factory=dict)


class StatusQuery:
    """Sends and answers status queries, from any thread of this rank.

    Args:
        finish_protocol: shares its communicator for these messages.
        rank, size: this rank and the number of ranks, in the world.
        wait: returns the name and start time of this rank's longest wait, or None.
    """

    def __init__(
        self,
        finish_protocol: FinishProtocol,
        rank: int,
        size: int,
        wait: Callable[[], tuple[str, float] | None],
    ) -> None:
        self._finish_protocol, self._rank, self.size, self._wait = finish_protocol, rank, size, wait
        self.timeout_s = 0.0  #: timeout of the latest communicator
        self._shown_s = float("-inf")  # when this rank last wrote or requested stacks
        self._answers: dict[int, StatusReport] = {}
        self._answered: dict[int, float] = {}
        self._sending: list[finish.Sent] = []

    def check_messages(self) -> None:
        """Receive queries and reports, and answer the queries."""
        self._finish_protocol.with_comm(self._take_in)

    def _take_in(self, comm: MPI.Intracomm) -> None:
        self._sending = [sent for sent in self._sending if not sent[0].Test()]
        for values in finish.received(comm, _ANSWER):
            answer = StatusReport(**values)
            self._answers[answer.rank], self._answered[answer.rank] = answer, time.monotonic()
        for asker, name, why in finish.received(comm, _QUESTION):
            if why:
                self._show(f"rank {asker} {why}")
            self._sending.append(finish.post(comm, vars(self._status_report(name)), asker, _ANSWER))

    def _status_report(self, name: str) -> StatusReport:
        wait, now = self._wait(), time.monotonic()
        if wait is None:
            does = f"{heartbeat.RankState.COMPUTES.value}{_place()}"
        else:
            does = f"waits in {wait[0]}, for {now - wait[1]:.0f} s"
        collective_counts = self._finish_protocol.collective_counts(name)
        mates = {mate.rank: mate.in_words(now) for mate in silent(now)}
        return StatusReport(self._rank, collective_counts, does, mates)

    def _show(self, why: str) -> None:
        """Write this rank's stacks, once."""
        if not self.showing_stacks:
            self._shown_s = time.monotonic()
            print_stacks(self._rank, why)
            self._show_silent()

    @property
    def showing_stacks(self) -> bool:
        """True if this rank wrote or requested stacks within the last `_SAME_CAUSE_S` seconds."""
        return time.monotonic() - self._shown_s < _SAME_CAUSE_S

    def _show_silent(self) -> None:
        """Make unresponsive ranks write their stacks.

        Only the lowest responsive rank of a host does so.
        """
        now, rank = time.monotonic(), self._rank
        if any(m.rank < rank and m.state(now) in ANSWERING for m in heartbeat.own.neighbours()):
            return
        signalled = [neighbour.signal(heartbeat.SHOW_STACKS) for neighbour in silent(now)]
        if any(signalled):  # a stopped process writes only after it continues
            time.sleep(heartbeat.SHOWN_S)

    def query_all(self, name: str, why: str) -> dict[int, StatusReport] | None:
        """Collect status reports from all other ranks for up to ANSWERED_S.

        Returns None, after the same time, if another rank is already collecting.

        Args:
            name: name of the communicator whose collectives are counted; empty: none.
            why: the reason, as the text after "rank 3".
        """
        if self.showing_stacks:  # the querying rank prints the reports
            until = time.monotonic() + ANSWERED_S + heartbeat.SHOWN_S
            while time.monotonic() < until:
                time.sleep(0.02)
                self.check_messages()
            return None
        self._shown_s = time.monotonic()
        others = set(range(self.size)) - {self._rank}
        self._answers.clear()
        self.ask(others, name, why)
        until = time.monotonic() + ANSWERED_S
        while others - self._answers.keys() and time.monotonic() < until:
            time.sleep(0.02)
            self.check_messages()
        answers = dict(self._answers)
        self._show_silent()
        return answers

    def ask(self, ranks: Iterable[int], name: str = "", why: str = "") -> None:
        """Send a query to some ranks: see `query_all`. Without a reason no stacks are written."""

        def ask(comm: MPI.Intracomm) -> None:
            for rank in ranks:
                question = self._rank, name, why
                self._sending.append(finish.post(comm, question, rank, _QUESTION))

        self._finish_protocol.with_comm(ask)

    def answered(self, rank: int) -> float:
        """Return the time of a rank's latest report, or 0.0 without a report."""
        return self._answered.get(rank, 0.0)

    def latest(self, ranks: Iterable[int]) -> dict[int, StatusReport]:
        """Return the latest reports of these ranks, as far as received."""
        return {rank: self._answers[rank] for rank in ranks if rank in self._answers}


class FinishWait:
    """Queries the awaited ranks periodically.

    The job ends if a rank does not respond within the status query's `timeout_s`. If the ranks
    respond but have not finished after that time, this rank prints their names once.

    Args:
        status_query: sends the queries.
        rank: this rank.

    Local.
    """

    def __init__(self, status_query: StatusQuery, rank: int) -> None:
        self._status_query, self._rank = status_query, rank
        self._asked: dict[int, float] = {}
        self._began_s: float | None = None
        self._reported = False

    def __call__(self, ranks: Collection[int]) -> None:
        """Query the awaited ranks if due. Call often, from the start of the wait.

        Args:
            ranks: the awaited ranks.
        """
        self._status_query.check_messages()
        now, timeout_s = time.monotonic(), self._status_query.timeout_s
        self._began_s = self._began_s or now
        silent = []
        for rank in ranks:
            asked, answered = self._asked.get(rank, 0.0), self._status_query.answered(rank)
            if answered >= asked and now - asked > max(timeout_s / 4, _ASKS_S):
                self._asked[rank] = now
                self._status_query.ask([rank])
            elif answered < asked and now - asked > timeout_s:
                silent.append(rank)
        if silent:
            self._end(silent)
        first = self._rank == (1 if 0 in ranks else 0)
        if first and not self._reported and now - self._began_s > timeout_s:
            self._reported = True
            print_labelled(
                "parallel_sgd: this rank has finished, and waits for "
                f"{in_words([*ranks])} to finish"
            )
            self._print_missing(ranks, self._status_query.latest(ranks))

    def _end(self, silent: Sequence[int]) -> None:
        timeout_s = self._status_query.timeout_s
        print_labelled(
            f"parallel_sgd: this rank has finished, and waits for {in_words(silent)}, which "
            f"{'has' if len(silent) == 1 else 'have'} not answered for timeout_s={timeout_s:g} s; "
            "ending the job"
        )
        report_status(Status.LOST)
        why = f"has finished, and waited more than {timeout_s:g} s since"
        self._print_missing(silent, self._status_query.query_all("", why))
        end_job(1)

    def _print_missing(
        self, ranks: Collection[int], answers: dict[int, StatusReport] | None
    ) -> None:
        for line in missing_in_words(ranks, answers, None):
            print_labelled(f"parallel_sgd: {line}")


def silent(now: float) -> list[Heartbeat]:
    """Return the heartbeats of this host's other ranks that run but do not respond."""
    return [
        neighbour
        for neighbour in heartbeat.own.neighbours()
        if neighbour.state(now) in heartbeat.NOT_ANSWERING
    ]


def rank_in_words(rank: int) -> str:
    """Name a world rank, with its process if it is on this host. Local."""
    for neighbour in heartbeat.own.neighbours():
        if neighbour.rank == rank:
            return f"rank {rank} (pid {neighbour.process})"
    return f"rank {rank}"


def missing_in_words(
    awaited: Collection[int], answers: dict[int, StatusReport] | None, collective_counts: int | None
) -> list[str]:
    """Explain, in lines, why a wait for these ranks timed out.

    Args:
        awaited: world ranks, without this one.
        answers: reports received; None if another rank is reporting the timeout.
        collective_counts: collectives entered by this rank on the communicator; None for a wait for
            a message.
    """
    if answers is None:
        return []
    now, neighbours = time.monotonic(), heartbeat.own.neighbours()
    states = {neighbour.rank: neighbour.in_words(now) for neighbour in neighbours}
    for neighbour in neighbours:
        if neighbour.state(now) in ANSWERING:
            states[neighbour.rank] += ", but does not answer: is its link cut?"
    for answer in answers.values():
        states |= answer.mates
    unanswered = [rank for rank in awaited if rank not in answers]
    lines = [states[rank] for rank in unanswered if rank in states]
    unknown = [rank for rank in unanswered if rank not in states]
    if unknown:
        does = "does" if len(unknown) == 1 else "do"
        lines.append(
            f"{in_words(unknown)} {does} not answer: stopped, cut off, or Python's lock is held "
            "there"
        )
    for rank in awaited:
        if rank in answers and collective_counts is None:
            lines.append(f"rank {rank} {answers[rank].does}")
        elif rank in answers and (answers[rank].collective_counts or 0) < cast(
            int, collective_counts
        ):
            lines.append(f"rank {rank} has not arrived: it {answers[rank].does}")
    return lines


def _place() -> str:
    """Return the main thread's position in the user's code as `` (train.py:12)``, or empty."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else user_location(traceback.extract_stack(frame))


def print_stacks(rank: int, why: str) -> None:
    """Write the stacks of this process's threads to stderr, with the rank before each line."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines = [f"parallel_sgd: {why}; this rank is here:"]
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if names.get(ident) != "watchdog":
            lines.append(f"thread {names.get(ident, ident)}:")
            lines += stack_lines(traceback.extract_stack(frame))
    write_stderr(*(f"[rank {rank}] {line}" for line in lines))


def stack_lines(stack: Iterable[traceback.FrameSummary]) -> list[str]:
    """Format a stack as lines, without frames before the user's script or inside this module."""
    shown = [frame for frame in stack if frame.filename not in _SKIPPED]
    return "".join(traceback.format_list(shown)).splitlines()
