"""Whether an algorithm is one: the conformance suite, for the built-in ones and for anybody's."""

from .registry import Check
from .suite import CHECKS, check_algorithm

__all__ = ["CHECKS", "Check", "check_algorithm"]
