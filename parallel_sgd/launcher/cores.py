"""How many cores there are."""

from __future__ import annotations

import os


def all_cores() -> int:
    """How many cores (hardware threads) this machine has."""
    return os.cpu_count() or 1


def usable_cores() -> int:
    """How many of them this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return all_cores()
