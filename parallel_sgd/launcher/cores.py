"""Count the cores of this machine."""

from __future__ import annotations

import os


def all_cores() -> int:
    """Return the number of cores (hardware threads) of this machine."""
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return all_cores()
