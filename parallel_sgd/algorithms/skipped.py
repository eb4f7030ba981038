"""What is left out of training since its numbers are not finite: how, and how often."""

from __future__ import annotations

import math
from typing import Any, Protocol

from ..errors import NotFinite
from ..optimizers import OptimizerState
from ..state import Cause, StateReplaced

MOST = 10  #: times in a row


class Restorable(Protocol):
    """Something that a minibatch changes before anybody knows whether its numbers are finite."""

    def take(self) -> None:
        """Keep what it is now. Local."""

    def restore(self) -> None:
        """Make it what was kept. Local."""


class Skipped:
    """Leaves out what is not finite, or does not, and counts.

    Ranks that synchronize in every step leave out a minibatch, all together, before it has changed
    anything. Ranks that go by themselves for a while find out when they synchronize: all go back to
    where they began. A worker of parameter servers leaves out its own push.

    Attributes:
        skips: whether it is left out; else it ends training.
        most, option: times in a row, after which training ends; and the option that says so.
        kept: what is put back, by name.
        minibatches, samples: that were left out so far: of all ranks, or of this worker.
        in_a_row: times since the numbers were finite.
        latest: why, at the latest time.

    Local: where ranks leave out together they count alike.
    """

    def __init__(self) -> None:
        self.skips, self.most, self.option = False, MOST, "most_skipped"
        self.kept: dict[str, Restorable] = {}
        self.minibatches = self.samples = self.in_a_row = 0
        self.latest = ""
        self._problem: str | None = None
        self._kept_at = self._ended_at = -1  # on the clock; the latter, what was left out last

    def state_replaced(self, event: StateReplaced) -> None:
        """Put back nothing of another run, of other ranks, or of later than the new state. Local.

        After a snapshot of this run was restored, what was kept before it, as the present block
        began, is still good.
        """
        self._problem = None
        latest = event.clock if event.cause is Cause.RESTORED else -1
        self._ended_at = self._ended_at if self._ended_at <= latest else -1
        self._kept_at = self._kept_at if self._kept_at <= latest else -1
        if self._kept_at < 0:
            self.keep(event.clock)

    def add_problem(self, problem: str) -> None:
        """Something else than the gradient of this rank's minibatch is not finite."""
        self._problem = NotFinite(problem)

    def check_loss(self, loss: float) -> None:
        """Look at the loss of this rank's minibatch, before the ranks agree on it."""
        if not math.isfinite(loss):
            self.add_problem(f"the loss is not finite: it is {loss}")

    def problem(self, own: str | None) -> str | None:
        """Why a minibatch, a block or a push cannot be trained on, asked once for each: the problem
        with its numbers, or with a loss since the last time."""
        told, self._problem = self._problem, None
        return own or told

    def keep(self, clock: int) -> None:
        """Keep what a minibatch may change, where it can be gone back to.

        Args:
            clock: samples so far. Nothing happens where that has been kept.
        """
        if self.skips and clock != self._kept_at:
            self._kept_at = clock
            for kept in self.kept.values():
                kept.take()

    def restore(self, begun: int, now: int) -> bool:
        """Make what was kept since the clock had `begun` what it is `now`.

        Returns:
            Whether it was kept just then. Else it is of the midst of a block, as a state was loaded
            there, or nothing: an optimizer's state may not be finite.
        """
        if not begun <= self._kept_at <= now:
            return False
        exact = begun == self._kept_at
        for kept in self.kept.values():
            kept.restore()
        self._kept_at = now
        return exact

    def count(
        self, problem: str, minibatches: int, samples: int, begun: int, now: int
    ) -> str | None:
        """Count what was left out.

        Args:
            problem: why, in one line.
            minibatches, samples: how many.
            begun, now: on the clock.
        Returns:
            Why training ends, in one line, where it was left out too often in a row.
        """
        in_a_row = begun == self._ended_at  # nothing was trained on between the two
        self.in_a_row = self.in_a_row + 1 if in_a_row else 1
        self._ended_at, self.latest = now, problem
        self.minibatches += minibatches
        self.samples += samples
        if self.in_a_row <= self.most:
            return None
        return (
            f"numbers were not finite {self.in_a_row} times in a row, and "
            f"{self.option}={self.most} of them are left out: {problem}"
        )

    def is_latest(self, clock: int) -> bool:
        """Whether the minibatch that has led to this clock was left out."""
        return clock == self._ended_at

    def report(self) -> dict[str, Any]:
        """As JSON can hold it; nothing where nothing was left out."""
        if not self.minibatches:
            return {}
        told = {"minibatches": self.minibatches, "samples": self.samples, "latest": self.latest}
        return {"skipped": told}


class SavedOptimizer:
    """The state of a local optimizer, but for its clock. Memory: a copy of its vectors.

    Args:
        state: at work.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._state = state
        self._copy: dict[str, Any] = {}

    def take(self) -> None:
        self._copy = self._state.copied(self._copy)

    def restore(self) -> None:
        self._state.put_back(self._copy)
