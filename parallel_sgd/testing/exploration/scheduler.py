"""The scheduler of a simulated job: one thread runs at a time, and a strategy chooses the next.

The threads are real, but only the thread with the baton runs. The baton is passed on at every call
of `parallel_sgd.runtime`: a point. Between two points a thread runs undisturbed. The clock advances
by a microsecond a point, and jumps to the next deadline when all threads sleep or wait.

A process fails by an exception at a point of each of its threads. All that other processes see
lies behind a point, so nothing that the exception unwinds is seen by them: as for a killed process.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ... import runtime
from ...runtime import SimulatedFailure, Thread

TICK_S = 1e-6  #: simulated time of a point
SOON_S = 2e-3  #: a sleep of at most this may end while other threads could run
POLLS = 50  #: jumps of the clock after which all tasks are taken to poll
FURTHER_S = 0.05  #: a further jump, if all tasks poll
MOST_POINTS = 500_000  #: of a schedule; more are taken for an endless loop
STUCK_S = 30.0  #: longest real time between two points

_PACKAGE = Path(runtime.__file__).parent
_OWN = {__file__, runtime.__file__, threading.__file__}


class ScheduleProblem(Exception):
    """A simulated job does not end by itself."""


class Deadlock(ScheduleProblem):
    """All threads of a simulated job wait for each other."""


class EndlessLoop(ScheduleProblem):
    """A simulated job goes on and on."""


class ScheduleEnds(BaseException):
    """Raised at every point of the threads still running, to end a schedule."""


class Task:
    """A thread of the simulated job.

    Args:
        number: count of earlier tasks.
        name: name of the thread.
        process: number of its process; None outside all ranks.

    Attributes:
        ready: what the task waits for; None: nothing, or a deadline alone.
        deadline: simulated time at which the wait ends, or None.
        interrupts: the failure of the process ends the wait.
        yields: the task polls.
    """

    __slots__ = (
        "baton", "deadline", "interrupts", "kind", "name", "number", "process", "ready", "thread",
        "yields",
    )  # fmt: skip

    def __init__(self, number: int, name: str, process: int | None) -> None:
        self.number, self.name, self.process = number, name, process
        self.baton = threading.Lock()
        # bounded: a new lock is free
        self.baton.acquire()
        self.ready: Callable[[], bool] | None = None
        self.deadline: float | None = None
        self.interrupts, self.yields, self.kind = False, False, "start"
        self.thread: Thread


class Strategy(Protocol):
    """Chooses the next task at every point."""

    def choose(self, current: Task, tasks: Sequence[Task], point: int) -> Task:
        """Return one of these tasks, of which there are at least two."""

    def chance(self) -> bool:
        """Return one of two possible outcomes."""

    def lets_sleepers_go(self, point: int) -> bool:
        """Return True if tasks that sleep for a short time are among the tasks to choose."""


class Faults(Protocol):
    """Faults of a schedule."""

    def due(self, process: int | None, points: int, total: int) -> list[int]:
        """Return the processes that fail at a point.

        Args:
            process: the process at the point, or None.
            points: of this process so far, with this one.
            total: points of the job so far, with this one.
        """

    def delay_s(self, message: int) -> float:
        """Return how late a message arrives, by the number of messages before."""

    def notified(self, process: int, points: int) -> bool:
        """Return True if a process has had a notice of preemption by its point of this number."""

    def file_operation(self, number: int, kind: str, path: Path) -> str:
        """Let a file operation fail.

        Args:
            number: of operations before.
            kind: "open", "fsync", "os.rename" and the like.
        Returns:
            "before" or "after" if the process fails before or after the operation; else "".
        Raises:
            OSError: the operation fails.
        """


class Schedule:
    """A run of a simulated job under a strategy, with faults.

    Args:
        strategy: chooses the next task at every point.
        faults: the faults of this run.

    Attributes:
        points: so far.
        points_of: by process.
        messages, operations: messages sent and files changed so far.
        failed: processes that have failed.
        digest: of all choices: equal for equal schedules.
    """

    def __init__(self, strategy: Strategy, faults: Faults) -> None:
        self._strategy, self._faults = strategy, faults
        self.points = self.messages = self.operations = self.digest = 0
        self.points_of: Counter[int] = Counter()
        self.failed: list[int] = []
        self._now = 0.0
        self._tasks: list[Task] = []  # not yet ended
        self._made = 0
        self._current: Task
        self._problem: BaseException | None = None
        self._ends = False
        self._jumps = 0  # of the clock since the latest change
        self._over = threading.Event()

    def run(self, main: Callable[[], object]) -> None:
        """Run a function as the first thread, until all threads have ended.

        Raises:
            Deadlock, EndlessLoop: the job does not end.
            BaseException: of any thread that ends with one.
        """
        thread = Thread(main, "main")
        self._current = self._add(thread, None)
        thread.scheduler = self
        threading.Thread.start(thread)
        self._current.baton.release()
        points = -1
        # bounded: by the number of points, each of which ends within STUCK_S
        while not self._over.wait(STUCK_S):
            if self.points == points:
                raise EndlessLoop(f"no point in {STUCK_S:g} s of real time:\n{self._stacks()}")
            points = self.points
        if self._problem is not None:
            raise self._problem

    # What `runtime` calls.

    def now(self) -> float:
        return self._now

    def point(self, kind: str) -> None:
        task = self._current
        task.kind, task.yields = kind, kind == "yield"
        self._switch(task, interrupts=True)

    def wait(
        self,
        kind: str,
        ready: Callable[[], bool] | None,
        seconds: float | None = None,
        *,
        interrupts: bool = True,
    ) -> bool:
        task = self._current
        task.kind, task.ready, task.yields = kind, ready, ready is None
        task.deadline = None if seconds is None else self._now + max(seconds, 0.0)
        try:
            self._switch(task, interrupts)
            return ready is not None and ready()
        finally:
            task.ready = task.deadline = None

    def start(self, thread: Thread, start: Callable[[], None]) -> None:
        process = self._current.process if thread.process is None else thread.process
        task = self._add(thread, process)
        try:
            start()
        except BaseException:
            self._tasks.remove(task)
            raise
        self.point("start")

    def run_thread(self, thread: Thread, run: Callable[[], None]) -> None:
        task = next(task for task in self._tasks if task.thread is thread)
        # bounded: until chosen
        task.baton.acquire()
        runtime.set_scheduler(self)
        try:
            run()
        except (ScheduleEnds, SimulatedFailure):
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            runtime.set_scheduler(None)
            thread.ended.set()
            self._tasks.remove(task)
            self._pass_on(task)

    def changed(self) -> None:
        self._jumps = 0

    def delivery(self) -> float:
        self.messages += 1
        return self._now + self._faults.delay_s(self.messages - 1)

    def chance(self) -> bool:
        return self._strategy.chance()

    def preempted(self) -> bool:
        process = self._current.process
        return process is not None and self._faults.notified(process, self.points_of[process])

    def file_operation(self, kind: str, path: Path) -> None:
        """Count a change of a file by a rank, before it happens. See `file_operations`."""
        process = self._current.process
        if process is None:
            return
        self.point(kind)
        self.operations += 1
        ends = self._faults.file_operation(self.operations - 1, kind, path)
        if ends:
            self.failed.append(process)
        if ends == "before":
            raise SimulatedFailure

    def process_failed(self) -> bool:
        return self._ends or self._current.process in self.failed

    def leave_process(self) -> None:
        self._current.process = None

    # The baton.

    def _add(self, thread: Thread, process: int | None) -> Task:
        task = Task(self._made, thread.name, process)
        task.thread = thread
        self._made += 1
        self._tasks.append(task)
        return task

    def _switch(self, task: Task, interrupts: bool) -> None:
        """Count a point of a task, and let any task go on."""
        self.points += 1
        self._now += TICK_S
        task.interrupts = interrupts
        process = None if task.process in self.failed else task.process
        if process is not None:
            self.points_of[process] += 1
        due = self._faults.due(process, self.points_of[process or 0], self.points)
        # A process without threads has finished.
        self.failed += [rank for rank in due if any(task.process == rank for task in self._tasks)]
        if self.points == MOST_POINTS:
            self._fail(
                EndlessLoop(f"no end after {MOST_POINTS} points of order:\n{self._stacks()}")
            )
        self._pass_on(task)
        if interrupts:
            self._interrupt(task)

    def _interrupt(self, task: Task) -> None:
        if self._ends:
            raise ScheduleEnds
        if task.process in self.failed:
            raise SimulatedFailure

    def _pass_on(self, task: Task) -> None:
        """Choose the next task, pass the baton, and wait for the baton, unless ended."""
        chosen = self._choose(task)
        if chosen is task:
            return
        ended = task not in self._tasks
        if chosen is None:
            self._over.set()
        else:
            self._current = chosen
            chosen.baton.release()
        if not ended:
            # bounded: until chosen again
            task.baton.acquire()

    def _choose(self, current: Task) -> Task | None:
        """Return the next task, or None if there is none."""
        tasks = [task for task in self._tasks if self._can_run(task)]
        if not tasks and self._tasks:
            self._jump()
            tasks = [task for task in self._tasks if self._can_run(task)]
        elif tasks and self._strategy.lets_sleepers_go(self.points):
            soon = self._now + SOON_S
            tasks += [
                task
                for task in self._tasks
                if task.deadline is not None and self._now < task.deadline <= soon
                if task not in tasks
            ]
        if not tasks:
            return None
        chosen = tasks[0]
        if len(tasks) > 1:
            chosen = self._strategy.choose(current, tasks, self.points)
        if not self._can_run(chosen) and chosen.deadline is not None:
            self._now = chosen.deadline
        self.digest = hash((self.digest, chosen.number))
        return chosen

    def _can_run(self, task: Task) -> bool:
        if task.interrupts and (self._ends or task.process in self.failed):
            return True
        if task.deadline is not None and task.deadline <= self._now:
            return True
        if task.ready is None:
            return task.deadline is None
        return task.ready()

    def _jump(self) -> None:
        """All tasks wait: set the clock to the next deadline. Without one, end the schedule.

        After many jumps without a change, all tasks poll. The clock then jumps further, but not
        past the deadline of a sleep.
        """
        deadlines = sorted(task.deadline for task in self._tasks if task.deadline is not None)
        self._jumps += 1
        if deadlines and self._jumps > POLLS:
            polled = deadlines[0] + FURTHER_S
            later = [deadline for deadline in deadlines if deadline > deadlines[0] + SOON_S]
            self._now = min([polled, *later])
        elif deadlines:
            self._now = deadlines[0]
        else:
            self._fail(Deadlock(f"all threads wait for each other:\n{self._stacks()}"))

    def _fail(self, problem: BaseException) -> None:
        """End the schedule with a problem."""
        if self._problem is None:
            self._problem = problem
        self._ends = True

    def _stacks(self) -> str:
        """Tell where each task stands."""
        frames = sys._current_frames()
        lines = []
        for task in self._tasks:
            frame = frames.get(task.thread.ident or 0)
            stack = traceback.extract_stack(frame) if frame else []
            places = [entry for entry in stack if entry.filename not in _OWN]
            where = ", in ".join(
                f"{entry.name} ({_short(entry.filename)}:{entry.lineno})"
                for entry in places[:-6:-1]
            )
            lines.append(f"  {task.name} waits ({task.kind}) in {where or 'its start'}")
        return "\n".join(lines)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(_PACKAGE.parent)) if _PACKAGE in path.parents else path.name
