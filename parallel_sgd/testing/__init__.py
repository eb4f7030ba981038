"""Tests of algorithms and of programs: a conformance suite, and seeded orders of the ranks."""

from .exploration.explore import Exploration, Outcome, ScheduleFailed, explore
from .registry import Check
from .suite import CHECKS, check_algorithm

__all__ = [
    "CHECKS",
    "Check",
    "Exploration",
    "Outcome",
    "ScheduleFailed",
    "check_algorithm",
    "explore",
]
