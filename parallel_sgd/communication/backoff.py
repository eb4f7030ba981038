"""Polling with increasing pauses."""

from __future__ import annotations

from collections.abc import Callable

from .. import runtime


class Backoff:
    """Pauses between two checks for an event. Local.

    The first checks follow at once, since answers are often immediate; other threads and processes
    may use the core in between. Later checks follow after sleeps of increasing length.

    Args:
        sleep: yields the core for a number of seconds, or until an event.
        at_once: checks before the first sleep.
        first_s: first sleep, in seconds.
        growth: factor between two sleeps; 1 for constant sleeps.
        longest_s: longest sleep, in seconds.
    """

    def __init__(
        self,
        sleep: Callable[[float], object],
        *,
        at_once: int = 0,
        first_s: float,
        growth: float = 1.0,
        longest_s: float = 1e-3,
    ) -> None:
        self._sleep, self._at_once, self._first_s = sleep, at_once, first_s
        self._growth, self._longest_s = growth, longest_s
        self.reset()

    def reset(self) -> None:
        """Start again with immediate checks, after an event."""
        self._asked, self._sleep_s = 0, self._first_s

    def pause(self) -> None:
        """Yield the core for a while, after a check without an event."""
        if self._asked < self._at_once and runtime.scheduler() is None:
            self._asked += 1
            runtime.sched_yield()
            return
        self._sleep(self._sleep_s)
        self._sleep_s = min(self._growth * self._sleep_s, self._longest_s)
