"""Validation of a learner's arguments: each of the required type, and equal on all ranks."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from ..algorithms import Algorithm
from ..communication import Communicator
from ..optimizers import UpdateRule
from ..options import all_options, values_of
from ..parameters import Parameters
from ..validation import instance, integer
from ..version import __version__


def agree_on_arguments(
    comm: Communicator,
    parameters: Parameters,
    optimizer: UpdateRule,
    algorithm: Algorithm[Any],
    sync_perf_stats: int,
    commit_every: int,
) -> tuple[int, int]:
    """Check that a learner's arguments are valid, and equal on all ranks. Collective.

    Returns:
        `sync_perf_stats` and `commit_every` as plain numbers.
    Raises:
        UserError: an argument is invalid, or the ranks disagree; on all ranks, unless `comm` itself
            is no communicator.
    """
    require_communicator(comm)
    comm.together(lambda: _check_kinds(parameters, optimizer, algorithm))
    every, commit_every = comm.together(
        lambda: (
            integer("sync_perf_stats", sync_perf_stats, 0),
            integer("commit_every", commit_every, 1),
        )
    )
    comm.require_agreement(
        {
            "parallel_sgd version": __version__,
            "sync_perf_stats": every,
            "commit_every": commit_every,
            "number of parameters": parameters.flat.size,
            "layout of the parameters": parameters.shapes,
            "dtype of the parameters": str(parameters.dtype),
            **_facts_of("algorithm", algorithm),
            **_facts_of("optimizer", optimizer),
        }
    )
    return every, commit_every


def require_communicator(comm: Any) -> None:
    """Refuse anything but a communicator: without one, no rank can tell the rest of a problem.
    Local."""
    instance("comm", comm, Communicator, "Communicator.world()")


def _check_kinds(parameters: Any, optimizer: Any, algorithm: Any) -> None:
    """Check each argument's type, also so that swapped arguments are noticed."""
    required: tuple[tuple[str, Any, type[Any], str], ...] = (
        ("parameters", parameters, Parameters, "model.parameters"),
        ("optimizer", optimizer, UpdateRule, "SGD(lr=0.1)"),
        ("algorithm", algorithm, Algorithm, "DataParallelSGD()"),
    )
    for name, value, kind, example in required:
        instance(name, value, kind, example)


def _facts_of(name: str, options: Any) -> dict[str, Any]:
    """Return the facts of an algorithm or an optimizer to compare: its class and each option."""
    if not is_dataclass(options):
        return {name: options}
    compared = {option.name for option in all_options(type(options)) if option.field.compare}
    values = {key: value for key, value in values_of(options).items() if key in compared}
    return {
        name: type(options).__name__,
        **{f"{option} of the {name}": value for option, value in values.items()},
    }
