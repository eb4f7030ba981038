"""Strategies: how to choose the order of a schedule.

Sources: Burckhardt, Kothari, Musuvathi, Nagarakatte, "A Randomized Scheduler with Probabilistic
Guarantees of Finding Bugs", ASPLOS 2010 (priorities); Emmi, Qadeer, Rakamarić, "Delay-Bounded
Scheduling", POPL 2011 (search).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from .scheduler import Task

CHANGES = 3  #: changes of priority in a schedule


class RandomOrder:
    """Chooses at random, or keeps the current task: how often, is random, too.

    Args:
        random: the source of choices.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._keeps = random.choice((0.0, 0.5, 0.9, 0.98))
        self._sleepers = random.choice((0.0, 0.0, 0.02, 0.2))

    def choose(self, current: Task, tasks: Sequence[Task], point: int) -> Task:
        if current in tasks and not current.yields and self._random.random() < self._keeps:
            return current
        return self._random.choice(tasks)

    def chance(self) -> bool:
        return self._random.random() < 0.5

    def lets_sleepers_go(self, point: int) -> bool:
        return self._random.random() < self._sleepers


class Priorities:
    """Runs the task of the highest priority; a few random points lower the current priority.

    Among n tasks and k points, a schedule finds a fault of `CHANGES` changes of order with a
    probability of at least 1 / (n k^CHANGES). A polling task gets the lowest priority.

    Args:
        random: the source of choices.
        points: expected points of the schedule.
    """

    def __init__(self, random: Random, points: int) -> None:
        self._random, self._of = random, dict[int, float]()
        self._changes = {random.randrange(1, points + 2) for _ in range(CHANGES)}
        self._lowest = 0.0
        self._sleepers = random.choice((0.0, 0.0, 0.02))

    def choose(self, current: Task, tasks: Sequence[Task], point: int) -> Task:
        if current.yields or point in self._changes:
            self._lowest -= 1.0
            self._of[current.number] = self._lowest
        return max(tasks, key=self._priority)

    def chance(self) -> bool:
        return self._random.random() < 0.5

    def lets_sleepers_go(self, point: int) -> bool:
        return self._random.random() < self._sleepers

    def _priority(self, task: Task) -> float:
        if task.number not in self._of:
            self._of[task.number] = self._random.random()
        return self._of[task.number]


class Deviations:
    """Lets the current task run until it waits, then the next one in turn, with deviations.

    Args:
        skips: by point, how many tasks are skipped there.

    Attributes:
        choices: the points with a choice, each with the number of tasks that could run.
    """

    def __init__(self, skips: Mapping[int, int]) -> None:
        self._skips, self.choices = skips, list[tuple[int, int]]()

    def choose(self, current: Task, tasks: Sequence[Task], point: int) -> Task:
        self.choices.append((point, len(tasks)))
        first = current.number + current.yields
        in_turn = sorted(tasks, key=lambda task: (task.number < first, task.number))
        return in_turn[self._skips.get(point, 0) % len(tasks)]

    def chance(self) -> bool:
        return False

    def lets_sleepers_go(self, point: int) -> bool:
        return False
