"""Ranks and their collectives: over MPI, over threads of one process, or a single rank."""

from .background import InBackground
from .communicator import TIMEOUT_S, Communicator, checked_timeout
from .threads import RankFailed, simulate

__all__ = ["TIMEOUT_S", "Communicator", "InBackground", "RankFailed", "checked_timeout", "simulate"]
