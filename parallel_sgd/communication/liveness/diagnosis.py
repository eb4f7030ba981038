"""A roll call: a rank that waits too long asks the others what they do, before it ends the job.

    who has waited too long    -> all       "what have you entered on communicator 0?"
    the watchdog of each rank  -> that one  "16 collectives, and I compute"

Each rank that is asked also writes its stacks, into its own log. Who does not answer has been
stopped, is cut off, or holds Python's lock; ranks on its host see which, and have a process that
holds the lock write its stacks all the same (`board`).

Likewise a rank that has ended asks those for which it waits whether they are still there: they may
go on for as long as they like, but not in silence. Everything here is local.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from ..phrases import in_words
from ..stderr import write_stderr
from . import heartbeat as heartbeat_table
from . import mail
from .abort import SCAFFOLD, user_location
from .heartbeat import ANSWERING, Heartbeat

if TYPE_CHECKING:
    from mpi4py import MPI

    from .finish import FinishProtocol

_QUESTION, _ANSWER = 2, 3  #: tags, beside those of `departures`

_SKIPPED = {*SCAFFOLD, __file__}

ANSWERED_S = 1.5  #: a rank whose watchdog's thread runs has answered by then
_SAME_S = 5.0  #: what ranks ask within so many seconds they ask for the same reason


@dataclass(frozen=True)
class StatusReport:
    """What a rank says of itself, and of the ranks on its host that may not answer.

    Attributes:
        entered: of the calls that were asked for; None: it knows of none.
        does: in words.
        mates: what the ranks on its host do that do not answer, in words, by rank.
    """

    rank: int
    collective_counts: int | None
    does: str
    mates: dict[int, str] = field(default_factory=dict)


class StatusQuery:
    """Asks and answers, beside all that this rank does, from any of its threads.

    Args:
        departures: whose messages these are beside.
        rank, size: this one of so many in the world.
        wait: what this rank waits in, and since when; None: it waits for nobody.
    """

    def __init__(
        self,
        finish_protocol: FinishProtocol,
        rank: int,
        size: int,
        wait: Callable[[], tuple[str, float] | None],
    ) -> None:
        self._finish_protocol, self._rank, self.size, self._wait = finish_protocol, rank, size, wait
        self.timeout_s = 0.0  #: of the latest communicator
        self._shown_s = float("-inf")  # when this rank has last shown, or asked for, stacks
        self._answers: dict[int, StatusReport] = {}
        self._heard: dict[int, float] = {}
        self._sending: list[mail.Sent] = []

    def check_messages(self) -> None:
        """Take in what others answer and ask."""
        self._finish_protocol.with_comm(self._take_in)

    def _take_in(self, comm: MPI.Intracomm) -> None:
        self._sending = [sent for sent in self._sending if not sent[0].Test()]
        for values in mail.received(comm, _ANSWER):
            answer = StatusReport(**values)
            self._answers[answer.rank], self._heard[answer.rank] = answer, time.monotonic()
        for asker, name, why in mail.received(comm, _QUESTION):
            if why:
                self._show(f"rank {asker} {why}")
            self._sending.append(mail.post(comm, vars(self._own(name)), asker, _ANSWER))

    def _own(self, name: str) -> StatusReport:
        wait, now = self._wait(), time.monotonic()
        if wait is None:
            does = f"{heartbeat_table.RankState.COMPUTES.value}{_place()}"
        else:
            does = f"waits in {wait[0]}, for {now - wait[1]:.0f} s"
        collective_counts = self._finish_protocol.collective_counts(name)
        mates = {line.rank: line.in_words(now) for line in silent(now)}
        return StatusReport(self._rank, collective_counts, does, mates)

    def _show(self, why: str) -> None:
        """Write this rank's stacks, once."""
        if not self.showing_stacks:
            self._shown_s = time.monotonic()
            print_stacks(self._rank, why)
            self._show_silent()

    @property
    def showing_stacks(self) -> bool:
        """Whether the stacks are being written just now, at some rank's request."""
        return time.monotonic() - self._shown_s < _SAME_S

    def _show_silent(self) -> None:
        """Have those that do not answer show their stacks: the first other rank on their host."""
        now, rank = time.monotonic(), self._rank
        if any(
            m.rank < rank and m.state(now) in ANSWERING for m in heartbeat_table.own.neighbours()
        ):
            return
        shows = [line.signal(heartbeat_table.SHOW_STACKS) for line in silent(now)]
        if any(shows):  # but one that is stopped does so when it goes on
            time.sleep(heartbeat_table.SHOWN_S)

    def query_all(self, name: str, why: str) -> dict[int, StatusReport] | None:
        """What the other ranks say of themselves, as far as they do so soon; None, after as long,
        where another one asks them just now.

        Args:
            name: of the calls that this rank waits in; empty: of none.
            why: this rank asks, after "rank 3".
        """
        if self.showing_stacks:  # what that one hears it tells
            until = time.monotonic() + ANSWERED_S + heartbeat_table.SHOWN_S
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
        """Ask for answers: see `query_all`. Where no reason is given, no stacks are shown."""

        def ask(comm: MPI.Intracomm) -> None:
            for rank in ranks:
                question = self._rank, name, why
                self._sending.append(mail.post(comm, question, rank, _QUESTION))

        self._finish_protocol.with_comm(ask)

    def heard(self, rank: int) -> float:
        """When a rank has last answered; 0.0: it has not yet."""
        return self._heard.get(rank, 0.0)

    def latest(self, ranks: Iterable[int]) -> dict[int, StatusReport]:
        """The latest answers of those ranks that have given one."""
        return {rank: self._answers[rank] for rank in ranks if rank in self._answers}


def silent(now: float) -> list[Heartbeat]:
    """The other ranks of this host that are there, and do not answer."""
    return [
        line
        for line in heartbeat_table.own.neighbours()
        if line.state(now) in heartbeat_table.NOT_ANSWERING
    ]


def missing_in_words(
    awaited: Collection[int], answers: dict[int, StatusReport] | None, collective_counts: int | None
) -> list[str]:
    """Why a wait for these ranks has lasted too long, as far as it can be told, in lines.

    Args:
        awaited: ranks of the world, without this one.
        answers: of those that have given one; None: another rank tells.
        entered: so many of the calls that were asked for this rank has entered; None: it waits for
            a message.
    """
    if answers is None:
        return []
    now = time.monotonic()
    seen = {line.rank: line.in_words(now) for line in heartbeat_table.own.neighbours()}
    for line in heartbeat_table.own.neighbours():
        if line.state(now) in ANSWERING:
            seen[line.rank] += ", but does not answer: is its link cut?"
    for answer in answers.values():
        seen |= answer.mates
    dumb = [rank for rank in awaited if rank not in answers]
    lines = [seen[rank] for rank in dumb if rank in seen]
    lost = [rank for rank in dumb if rank not in seen]
    if lost:
        does = "does" if len(lost) == 1 else "do"
        lines.append(
            f"{in_words(lost)} {does} not answer: stopped, cut off, or Python's lock is held there"
        )
    for rank in awaited:
        if rank in answers and collective_counts is None:
            lines.append(f"rank {rank} {answers[rank].does}")
        elif rank in answers and (answers[rank].collective_counts or 0) < cast(
            int, collective_counts
        ):
            lines.append(f"rank {rank} has not come: it {answers[rank].does}")
    return lines


def _place() -> str:
    """Where the main thread is in the user's own code: `` (train.py:12)``, or nothing."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "" if frame is None else user_location(traceback.extract_stack(frame))


def print_stacks(rank: int, why: str) -> None:
    """Write the stacks of this process's threads to stderr, in lines led by the rank."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines = [f"parallel_sgd: {why}; this rank is here:"]
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] != main):
        if names.get(ident) != "watchdog":
            lines.append(f"thread {names.get(ident, ident)}:")
            lines += stack_lines(traceback.extract_stack(frame))
    write_stderr(*(f"[rank {rank}] {line}" for line in lines))


def stack_lines(stack: Iterable[traceback.FrameSummary]) -> list[str]:
    """A stack in lines, without the frames that only lead to the user's script, or to here."""
    shown = [frame for frame in stack if frame.filename not in _SKIPPED]
    return "".join(traceback.format_list(shown)).splitlines()
