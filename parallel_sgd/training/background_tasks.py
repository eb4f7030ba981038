"""Tasks that run in the background of training, such as writing a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..communication import InBackground
from ..errors import SharedError, SharedProblem


class BackgroundTasks:
    """The background tasks of one learner.

    Args:
        fail: ends training on all ranks, because of a problem.

    Attributes:
        work: tasks still running, or not yet checked.

    Local, except for `fail`.
    """

    def __init__(self, fail: Callable[[str], NoReturn]) -> None:
        self._fail = fail
        self.work: list[InBackground[Any]] = []

    def add(self, work: InBackground[Any]) -> None:
        """Add a task, and drop tasks that have ended."""
        self.work = [other for other in self.work if not other.done] + [work]

    def wait(self) -> None:
        """Wait for the end of every task, without reporting failures."""
        for work in self.work:
            work.wait()

    def check(self) -> None:
        """Report failed tasks to all ranks, in place of a step."""
        failed = [work for work in self.work if work.failed]
        self.work = [work for work in self.work if not work.done]
        for work in failed:
            error = work.error()
            if isinstance(error, SharedError):
                self._fail(SharedProblem(error))
            work.result()

    def end(self, *, failed: bool) -> None:
        """Collect the results of all tasks. After a failure of training, drop the tasks without
        waiting.

        Raises:
            UserError: on all ranks, if a task has failed.
        """
        work, self.work = self.work, []
        for one in work:
            if not failed:
                one.result()
