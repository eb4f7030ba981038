"""Run a program of ranks in many orders, with failures, until a fault shows."""

from __future__ import annotations

import gc
import io
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from random import Random, SystemRandom
from typing import Any

from ...communication import Communicator, checked_timeout, simulate, simulate_recovery
from ...communication.background import uncollected
from ...errors import PeerFailure, Preempted, RankFailed, RanksLost, SharedPeerFailure, UserError
from ...validation import choice, function, integer, shown
from .faults import (
    AFTER,
    ENDING,
    HOW,
    SLOW_S,
    Failure,
    FileFault,
    Notice,
    Planned,
    file_operations,
)
from .scheduler import Schedule, ScheduleProblem, Strategy
from .strategies import Deviations, Priorities, RandomOrder

KINDS = ("ranks", "files", "notices")
ORDERS = ("mixed", "random", "priorities", "search")
SHOWN = 20  #: lines of output shown with a problem
DEVIATIONS = 2  #: most deviations from the plain order in a search
ENDS = (RankFailed, RanksLost, PeerFailure, SharedPeerFailure, Preempted)
"""Errors that may end a program after the failure of a rank, or a notice of preemption."""

_one_at_a_time = threading.Lock()  # a schedule replaces functions and streams of the process
_NAME = re.compile(r"(random|priorities|search):(\d+)((?:,\d+\+\d+)*)")


class ScheduleFailed(AssertionError):
    """A schedule has shown a fault of the program. The text tells how to repeat the schedule.

    Attributes:
        schedule: name of the schedule, for `explore(only=...)`.
    """

    def __init__(self, text: str, schedule: str) -> None:
        super().__init__(text)
        self.schedule = schedule


@dataclass
class Exploration:
    """The counts of an exploration.

    Attributes:
        schedules: number of schedules.
        distinct: number of different orders among them.
        points: of all schedules.
        failures: number of failed ranks.
        outcomes: number of schedules by outcome: "finished", or the name of an error.
    """

    schedules: int = 0
    points: int = 0
    failures: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    digests: set[int] = field(default_factory=set, repr=False)

    @property
    def distinct(self) -> int:
        return len(self.digests)

    def __str__(self) -> str:
        ends = ", ".join(f"{number} {name}" for name, number in sorted(self.outcomes.items()))
        return (
            f"{self.schedules} schedules ({self.distinct} different), {self.points} points, "
            f"{self.failures} failures of ranks: {ends}"
        )


@dataclass(frozen=True)
class Outcome:
    """The end of a schedule, for the `check` of `explore`.

    Attributes:
        results: of the ranks, standby ranks last; None for failed ranks.
        failed: world ranks that have failed, in order.
        error: of the program, if it ends with an error after a fault; None if it finishes.
    """

    results: list[Any]
    failed: tuple[int, ...]
    error: BaseException | None = None


def explore(
    program: Callable[[Communicator], Any],
    ranks: int = 4,
    schedules: int = 1000,
    faults: int = 1,
    *,
    spares: int = 0,
    kinds: str | Sequence[str] = "ranks",
    check: Callable[[Outcome], object] | None = None,
    may_fail: bool = True,
    order: str = "mixed",
    seed: int | None = None,
    only: str | None = None,
    timeout_s: float = 10.0,
) -> Exploration:
    """Run a program in many orders of its ranks' steps, with failures. Raises on the first fault.

    The ranks are threads. A single thread runs at a time. Wherever ranks wait, send or receive, the
    next thread is chosen anew: at random, by random priorities, or in a search. Time is simulated:
    if all threads wait, the clock jumps to the next timeout. Given the name of a schedule, a
    program runs in the same way again, if no data of the machine (such as its clock) count in it.

    These are faults: threads wait for each other without an end; the program makes more than
    500,000 choices; an error in a schedule without faults; after a fault, an error that does not
    report failed ranks or a failed file; the exception of a background thread that no thread asks
    for; and any exception of `check`.

    Args:
        program: run on each rank, with the rank's communicator; anew for every schedule. Threads
            and locks of the program must be those of `parallel_sgd.runtime`.
        ranks: number of ranks.
        schedules: number of schedules.
        faults: most faults in a schedule, each at a random point. With 0, the ranks are not
            fault-tolerant.
        spares: number of standby ranks, which replace failed ranks.
        kinds: of faults: "ranks" (a rank fails, like a killed process; at least a single rank
            remains), "files" (a change of a file fails, or is the last of its rank), "notices" (a
            rank gets a notice of preemption), or several of these.
        check: called with the outcome of each schedule. Raises an AssertionError if the outcome is
            wrong.
        may_fail: the program may end with an error after a fault. False: training must go on.
        order: "random", "priorities", "mixed" (these two in turn), or "search" (the orders with at
            most 2 deviations from a plain order, as far as `schedules` reaches).
        seed: of the first schedule. Later schedules count up. None: a new seed each time.
        only: name of a schedule, to repeat this schedule alone.
        timeout_s: longest wait of a rank, in simulated seconds.
    Returns:
        Counts of what was run.
    Raises:
        ScheduleFailed: names the schedule, the ranks, and where they stand.
        UserError: an argument is not as required.

    Local. Cost: some 10 µs a point; a training step of 4 ranks is a few hundred points.

    >>> explore(lambda comm: comm.barrier(), ranks=2, schedules=10, faults=0, seed=1).schedules
    10
    """
    function("program", program, "of a communicator")
    ranks, schedules = integer("ranks", ranks, 1), integer("schedules", schedules, 1)
    faults, spares = integer("faults", faults, 0), integer("spares", spares, 0)
    timeout_s = checked_timeout(timeout_s)
    choice("order", order, ORDERS)
    chosen = [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in chosen:
        choice("kinds", kind, KINDS)
    if check is not None:
        function("check", check, "of an outcome")
    first = SystemRandom().randrange(1 << 32) if seed is None else integer("seed", seed, 0)
    runner = _Runner(program, ranks, faults, spares, chosen, check, may_fail, timeout_s)
    if only is not None:
        runner.run(_Name.parsed(only))
        return runner.done
    if order == "search":
        runner.search(first, schedules)
        return runner.done
    kinds = ("priorities", "random") if order == "mixed" else (order,)
    for number in range(first, first + schedules):
        runner.run(_Name(kinds[number % len(kinds)], number))
    return runner.done


@dataclass(frozen=True)
class _Name:
    """Name of a schedule: how its order is chosen, the seed of its choices and faults, and in a
    search the deviations from the plain order, by point."""

    kind: str
    seed: int
    skips: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        skips = "".join(f",{point}+{skipped}" for point, skipped in self.skips)
        return f"{self.kind}:{self.seed}{skips}"

    @staticmethod
    def parsed(text: str) -> _Name:
        matched = _NAME.fullmatch(text) if isinstance(text, str) else None
        if matched is None:
            raise UserError(f"only={shown(text)} must be the name of a schedule, as in an error")
        kind, seed, skips = matched.groups()
        pairs = [skip.split("+") for skip in skips.split(",")[1:]]
        return _Name(kind, int(seed), tuple((int(point), int(n)) for point, n in pairs))


class _Runner:
    """Runs schedules of a program, and counts the schedules in `done`."""

    def __init__(
        self,
        program: Callable[[Communicator], Any],
        ranks: int,
        faults: int,
        spares: int,
        kinds: Sequence[str],
        check: Callable[[Outcome], object] | None,
        may_fail: bool,
        timeout_s: float,
    ) -> None:
        self._program, self._ranks, self._faults, self._spares = program, ranks, faults, spares
        self._kinds, self._check, self._may_fail = kinds, check, may_fail
        self._timeout_s = timeout_s
        self.done = Exploration()
        self._plain: Schedule | None = None  # the plain order, without faults

    def run(self, name: _Name) -> Deviations | None:
        """Run a schedule. Return the choices of a search."""
        plain = self._plain_order()
        random = Random(name.seed)
        planned = self._draw(random, plain)
        strategy: Strategy
        deviations = None
        if name.kind == "random":
            strategy = RandomOrder(random)
        elif name.kind == "priorities":
            strategy = Priorities(random, plain.points)
        else:
            strategy = deviations = Deviations(dict(name.skips))
        self._run(strategy, planned, str(name))
        return deviations

    def search(self, seed: int, schedules: int) -> None:
        """Run schedules with few deviations first, those with an early deviation first."""
        level: list[_Name] = [_Name("search", seed)]
        for deviations in range(DEVIATIONS + 1):
            following: list[_Name] = []
            for name in level:
                if self.done.schedules == schedules:
                    return
                ran = self.run(name)
                assert ran is not None
                room = schedules - len(following) if deviations < DEVIATIONS else 0
                for skips in _later(ran, name.skips, room):
                    following.append(_Name("search", seed, skips))
            level = following

    def _plain_order(self) -> Schedule:
        if self._plain is None:
            self._plain = self._run(Deviations({}), Planned(), "search:0")
            self.done = Exploration()
        return self._plain

    def _draw(self, random: Random, plain: Schedule) -> Planned:
        """Draw the faults of a schedule, given the counts of the plain order."""
        planned = Planned(random=random)
        if plain.messages and random.random() < 0.3:
            planned.slow, planned.slow_s = random.choice((0.01, 0.1, 0.5)), random.choice(SLOW_S)
        everyone = [*range(self._ranks + self._spares)]
        random.shuffle(everyone)
        wanted = random.randint(1, self._faults) if self._faults and random.random() < 0.9 else 0
        ends = 0  # ranks that fail
        for _ in range(wanted):
            kind, rank = random.choice(self._kinds), everyone[-1]
            point = random.randint(1, max(1, plain.points_of[rank]))
            if kind == "files" and plain.operations:
                hows = [how for how in HOW if how not in ENDING or ends < self._ranks - 1]
                operation, how = random.randrange(plain.operations), random.choice(hows)
                ends += how in ENDING
                lasting = how in ("full", "error") and random.random() < 0.5
                planned.file_faults.append(FileFault(operation, how, lasting))
            elif kind == "notices":
                planned.notices.append(Notice(rank, point))
            elif kind == "ranks" and ends < self._ranks - 1:
                ends += 1
                waits, after = random.random() < 0.3, None
                if planned.failures and random.random() < 0.5:
                    waits, after = False, planned.failures[-1]
                    point = int(AFTER ** random.random())
                elif waits:
                    point = random.randint(1, plain.points)
                planned.failures.append(Failure(everyone.pop(), point, waits, after))
        return planned

    def _run(self, strategy: Strategy, planned: Planned, name: str) -> Schedule:
        """Run a schedule, and check its outcome."""
        schedule, results = Schedule(strategy, planned), list[Any]()
        error: BaseException | None = None
        said, before = io.StringIO(), uncollected()
        with (
            _one_at_a_time,
            _no_collection(),
            redirect_stdout(said),
            redirect_stderr(said),
            file_operations(schedule),
        ):
            try:
                schedule.run(lambda: results.extend(self._simulated()))
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                error = raised
        failed = tuple(schedule.failed)
        problem = self._problem(error, results, failed, planned)
        for task in uncollected():
            if task not in before:
                unheard = task.error()
                if error is None and problem is None:
                    problem = f"no one has asked for the error of a thread: {unheard!r}"
        if problem is not None:
            only = "" if name == "search:0" else f"; repeat it by only={name!r}"
            lines = "".join(f"\n  | {line}" for line in said.getvalue().splitlines()[-SHOWN:])
            raise ScheduleFailed(
                f"schedule {name} of {self._ranks} ranks ({planned}{only}): {problem}{lines}", name
            ) from error
        done = self.done
        done.schedules += 1
        done.points += schedule.points
        done.failures += len(failed)
        done.outcomes["finished" if error is None else type(error).__name__] += 1
        done.digests.add(schedule.digest)
        return schedule

    def _simulated(self) -> list[Any]:
        if self._faults or self._spares:
            return simulate_recovery(
                self._ranks, self._program, spares=self._spares, timeout_s=self._timeout_s
            )
        return simulate(self._ranks, self._program, timeout_s=self._timeout_s)

    def _problem(
        self,
        error: BaseException | None,
        results: list[Any],
        failed: tuple[int, ...],
        planned: Planned,
    ) -> str | None:
        """Return what is wrong with the end of a schedule, or None."""
        excused = self._may_fail and planned.struck and isinstance(error, ENDS)
        if planned.file_faults and isinstance(error, UserError) and self._may_fail:
            excused = True
        if error is not None and not excused:
            kind = "" if isinstance(error, ScheduleProblem) else f"{type(error).__name__}: "
            return f"{kind}{error}"
        if self._check is not None:
            try:
                self._check(Outcome(results, failed, error))
            except Exception as wrong:
                kind = "" if isinstance(wrong, AssertionError) else f"{type(wrong).__name__}: "
                return f"the check of its outcome fails: {kind}{wrong}"
        return None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no cycles of objects are collected: their finalizers would run at chance points."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _later(
    ran: Deviations, skips: tuple[tuple[int, int], ...], room: int
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield at most `room` sets of deviations: the given set, and a later deviation."""
    last = skips[-1][0] if skips else 0
    for point, tasks in ran.choices:
        for skipped in range(1, tasks if point > last else 0):
            if room <= 0:
                return
            room -= 1
            yield (*skips, (point, skipped))
