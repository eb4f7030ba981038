"""Ranks and their collectives: over MPI, over threads of one process, or a single rank."""

from .background import InBackground, ProgramEnds, program_ends
from .communicator import (
    SIGN_FACTOR,
    SIGN_PRIME,
    TIMEOUT_S,
    Communicator,
    checked_timeout,
    default_timeout,
)
from .endpoint import Endpoint
from .loss import is_loss, meet_again
from .phrases import CHECKSUM
from .roles import WHOLE_MINIBATCH, Everybody, Group, Roles, Together
from .thread_endpoint import RankFailed
from .threads import simulate
from .worlds import single, world

__all__ = [
    "CHECKSUM",
    "SIGN_FACTOR",
    "SIGN_PRIME",
    "TIMEOUT_S",
    "WHOLE_MINIBATCH",
    "Communicator",
    "Endpoint",
    "Everybody",
    "Group",
    "InBackground",
    "ProgramEnds",
    "RankFailed",
    "Roles",
    "Together",
    "checked_timeout",
    "default_timeout",
    "is_loss",
    "meet_again",
    "program_ends",
    "simulate",
]

Communicator._make_world, Communicator._make_single = world, single
