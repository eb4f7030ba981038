"""How a rank waits for what it has to ask for: often at first, then less and less often."""

from __future__ import annotations

import os
from collections.abc import Callable


class Backoff:
    """Pauses between two questions whether something has come. Local.

    The first questions follow at once, since answers often do; in between other threads and
    processes may have the core. Later ones follow after sleeps, each longer than the one before.

    Args:
        sleep: leaves the core to others for so many seconds, or until something comes.
        at_once: questions before the first sleep.
        first_s: the first sleep.
        growth: of each sleep over the one before; 1 where all are alike.
        longest_s: no sleep is longer.
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
        """Something has come."""
        self._asked, self._sleep_s = 0, self._first_s

    def pause(self) -> None:
        """Nothing has come yet: leave the core to others for a while."""
        if self._asked < self._at_once:
            self._asked += 1
            os.sched_yield()
            return
        self._sleep(self._sleep_s)
        self._sleep_s = min(self._growth * self._sleep_s, self._longest_s)
