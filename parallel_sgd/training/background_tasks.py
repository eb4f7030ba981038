"""What goes on beside training: checkpoints that are being written, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..communication import InBackground
from ..errors import SharedError, SharedProblem


class BackgroundTasks:
    """The work that runs in the background of one learner.

    Args:
        fail: ends training on all ranks, for a problem.

    Attributes:
        work: that may yet be under way.

    Local, but for what `fail` does.
    """

    def __init__(self, fail: Callable[[str], NoReturn]) -> None:
        self._fail = fail
        self.work: list[InBackground[Any]] = []

    def add(self, work: InBackground[Any]) -> None:
        """Hear of a piece of work from now on."""
        self.work = [other for other in self.work if not other.done] + [work]

    def wait(self) -> None:
        """Wait until nothing is under way; nothing is said of what has failed."""
        for work in self.work:
            work.wait()

    def look(self) -> None:
        """Tell all ranks of what has failed, in place of a step."""
        failed = [work for work in self.work if work.failed]
        self.work = [work for work in self.work if not work.done]
        for work in failed:
            error = work.error()
            if isinstance(error, SharedError):
                self._fail(SharedProblem(error))
            work.result()

    def end(self, *, failed: bool) -> None:
        """Wait for all of it, or where training has failed for nothing.

        Raises:
            UserError: on all ranks, if some of it has failed.
        """
        work, self.work = self.work, []
        for one in work:
            if not failed:
                one.result()
