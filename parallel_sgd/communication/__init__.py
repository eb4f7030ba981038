"""Ranks and their collectives: over MPI, over threads of a process, or a single rank.

Public names based on NumPy are imported on first use, since a launcher needs no NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import RankFailed, RanksChanged
from .background import InBackground, ProgramEnds, program_ends  # exit handlers: before the user's
from .elastic.retry import can_recover, reconfigure_ranks, retry
from .job_environment import launched_rank, launched_size, without_launcher
from .phrases import CHECKSUM
from .timeouts import TIMEOUT_S, checked_timeout, default_timeout

if TYPE_CHECKING:
    from .agreement import FINGERPRINT_FACTOR, FINGERPRINT_PRIME
    from .elastic.simulated import simulate_recovery
    from .endpoint import Endpoint
    from .roles import WHOLE_MINIBATCH, AllRanks, AllTrain, Group, Roles
    from .threads.communicator import simulate
    from .world import Communicator

__all__ = [
    "CHECKSUM",
    "FINGERPRINT_FACTOR",
    "FINGERPRINT_PRIME",
    "TIMEOUT_S",
    "WHOLE_MINIBATCH",
    "AllRanks",
    "AllTrain",
    "Communicator",
    "Endpoint",
    "Group",
    "InBackground",
    "ProgramEnds",
    "RankFailed",
    "RanksChanged",
    "Roles",
    "can_recover",
    "checked_timeout",
    "default_timeout",
    "launched_rank",
    "launched_size",
    "program_ends",
    "reconfigure_ranks",
    "retry",
    "simulate",
    "simulate_recovery",
    "without_launcher",
]

_MODULES = {
    "agreement": ("FINGERPRINT_FACTOR", "FINGERPRINT_PRIME"),
    "elastic.simulated": ("simulate_recovery",),
    "endpoint": ("Endpoint",),
    "roles": ("WHOLE_MINIBATCH", "AllRanks", "Group", "Roles", "AllTrain"),
    "threads.communicator": ("simulate",),
    "world": ("Communicator",),  # sets the functions that make a world
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
