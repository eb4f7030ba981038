"""The conformance suite for algorithms: the built-in algorithms and yours."""

from .registry import Check
from .suite import CHECKS, check_algorithm

__all__ = ["CHECKS", "Check", "check_algorithm"]
