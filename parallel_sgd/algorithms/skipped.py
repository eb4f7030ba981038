"""Skipping of minibatches, blocks and pushes with non-finite values."""

from __future__ import annotations

import math
from typing import Any, Protocol

from ..errors import NotFinite
from ..local_step import OptimizerState
from ..state import Cause, StateReplaced

MOST = 10  #: skips in a row


class Restorable(Protocol):
    """Data that a minibatch changes before its values are known to be finite."""

    def take(self) -> None:
        """Save the present data. Local."""

    def restore(self) -> None:
        """Restore the saved data. Local."""


class Skipped:
    """The policy for non-finite values: skip or end training. Counts the skips.

    Ranks that synchronize in every step skip a minibatch together, before any change. Ranks with
    local periods find non-finite values at the next synchronization, and all return to the start of
    the period. A worker of parameter servers skips its own push.

    Attributes:
        skips: True to skip; False to end training.
        most, option: number of skips in a row before training ends, and the option's name.
        kept: data to restore, by name.
        minibatches, samples: skipped so far: of all ranks, or of this worker.
        in_a_row: number of skips since the latest finite values.
        latest: reason of the latest skip.

    Local. Ranks that skip together count the same.
    """

    def __init__(self) -> None:
        self.skips, self.most, self.option = False, MOST, "most_skipped"
        self.kept: dict[str, Restorable] = {}
        self.minibatches = self.samples = self.in_a_row = 0
        self.latest = ""
        self._problem: str | None = None
        # Clocks: of the saved data, and of the end of the latest skip.
        self._kept_at = self._ended_at = -1

    def state_replaced(self, event: StateReplaced) -> None:
        """Discard saved data of other ranks, of a different run, or of later than the new state.

        After a snapshot of this run was restored, data saved at the start of the present block
        remain valid. Local.
        """
        self._problem = None
        latest = event.clock if event.cause is Cause.RESTORED else -1
        self._ended_at = self._ended_at if self._ended_at <= latest else -1
        self._kept_at = self._kept_at if self._kept_at <= latest else -1
        if self._kept_at < 0:
            self.keep(event.clock)

    def add_problem(self, problem: str) -> None:
        """Report a non-finite value outside this rank's gradient."""
        self._problem = NotFinite(problem)

    def check_loss(self, loss: float) -> None:
        """Check the loss of this rank's minibatch, before the ranks agree on the minibatch."""
        if not math.isfinite(loss):
            self.add_problem(f"the loss is not finite: it is {loss}")

    def problem(self, own: str | None) -> str | None:
        """Return why a minibatch, a block or a push cannot be trained on, or None.

        Called once for each.

        Args:
            own: problem of the values themselves. Takes precedence over a reported problem, such as
                a loss.
        """
        reported, self._problem = self._problem, None
        return own or reported

    def keep(self, clock: int) -> None:
        """Save the data that the next minibatches may change, if skipping is on.

        Args:
            clock: samples so far. Data already saved at this clock are not saved again.
        """
        if self.skips and clock != self._kept_at:
            self._kept_at = clock
            for kept in self.kept.values():
                kept.take()

    def restore(self, begun: int, now: int) -> bool:
        """Restore the data saved between the clocks `begun` and `now`.

        Args:
            begun, now: clock at the start of the skipped period, and at present.
        Returns:
            True if the data were saved at `begun` exactly. Otherwise nothing was restored, or a
            state was loaded within the period and its data were restored: an optimizer's state may
            then not be finite.
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
        """Count a skip.

        Args:
            problem: the reason, in a line.
            minibatches, samples: number skipped.
            begun, now: clock at the start of the skipped period, and at present.
        Returns:
            The reason to end training, in a line, after too many skips in a row; else None.
        """
        in_a_row = begun == self._ended_at  # no training since the latest skip
        self.in_a_row = self.in_a_row + 1 if in_a_row else 1
        self._ended_at, self.latest = now, problem
        self.minibatches += minibatches
        self.samples += samples
        if self.in_a_row <= self.most:
            return None
        return (
            f"numbers were not finite {self.in_a_row} times in a row, and at most "
            f"{self.option}={self.most} minibatches in a row are skipped: {problem}"
        )

    def is_latest(self, clock: int) -> bool:
        """Return True if the minibatch that ended at `clock` was skipped."""
        return clock == self._ended_at

    def report(self) -> dict[str, Any]:
        """Return the counts as JSON values; empty without skips."""
        if not self.minibatches:
            return {}
        counts = {"minibatches": self.minibatches, "samples": self.samples, "latest": self.latest}
        return {"skipped": counts}


class SavedOptimizer:
    """A copy of a local optimizer's state, except for its clock. Memory: a copy of the vectors.

    Args:
        state: of the optimizer in use.
    """

    def __init__(self, state: OptimizerState) -> None:
        self._state = state
        self._copy: dict[str, Any] = {}

    def take(self) -> None:
        self._copy = self._state.copied(self._copy)

    def restore(self) -> None:
        self._state.restore(self._copy)
