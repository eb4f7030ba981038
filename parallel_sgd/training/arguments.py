"""Validation of a learner's arguments: each of the required type, and equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..algorithms import Algorithm
from ..communication import Communicator
from ..errors import SharedError
from ..local_step import UpdateRule
from ..options import all_options, values_of
from ..parameters import Parameters
from ..validation import choice, instance, integer
from ..version import __version__
from .consistency import EVERY
from .model_adapter import ModelAdapter
from .non_finite import MOST_SKIPPED, POLICIES, NotFinite, require_can_skip
from .recovery.rollback import COMMIT_EVERY


@dataclass(frozen=True)
class Options:
    """A learner's options; `Learner` documents them."""

    sync_perf_stats: int = 0
    minibatch_size: int | None = None
    commit_every: int = COMMIT_EVERY
    not_finite: NotFinite = "stop"
    most_skipped: int = MOST_SKIPPED
    compare_every: int = EVERY

    @property
    def skips(self) -> bool:
        """True if minibatches that are not finite are skipped. Local."""
        return self.not_finite == "skip"

    def checked(self, algorithm: Algorithm[Any]) -> Options:
        """Return the options as plain numbers. Local.

        Raises:
            UserError: an option is invalid, or `algorithm` cannot skip.
        """
        if choice("not_finite", self.not_finite, POLICIES) == "skip":
            require_can_skip(algorithm)
        size = self.minibatch_size
        return Options(
            integer("sync_perf_stats", self.sync_perf_stats, 0),
            None if size is None else integer("minibatch_size", size, 1),
            integer("commit_every", self.commit_every, 1),
            self.not_finite,
            integer("most_skipped", self.most_skipped, 0),
            integer("compare_every", self.compare_every, 0),
        )


class AgreedArguments:
    """A learner's arguments, equal on all ranks, and carried through recoveries.

    Args:
        options: the learner's.
        number: of the learner among those of its communicator.

    Attributes:
        options: as plain numbers, after the first comparison.
        choices: choices by measurements, such as of a transport, by name; the same on all ranks.
        generation: of the ranks, at the latest comparison.
    """

    def __init__(self, options: Options, number: int) -> None:
        self.options, self.generation, self._number = options, 0, number
        self.choices: dict[str, Any] = {}
        self._are_compared = False

    def renew(self, world: Communicator, adapter: ModelAdapter, algorithm: Algorithm[Any]) -> None:
        """Compare the arguments of all ranks, if any rank has joined since the latest comparison.
        Collective. Choices are carried over to ranks that join.

        Raises:
            SharedError: on all ranks, if an argument is invalid on any rank, or the ranks disagree;
                or if the ranks recover different learners.
        """
        own = self._number, self._are_compared, self.choices, self.generation
        numbers, compared, choices, generations = zip(*world.allgather_object(own), strict=True)
        if len(set(numbers)) > 1:
            raise SharedError(
                "a rank has failed, and the remaining ranks cannot continue, because they are in "
                f"different learners, numbers {list(numbers)}: with --survive, train a single "
                "learner at a time"
            )
        self.generation = max(generations)
        if not all(compared):
            adapter.prepare(world)
            self.options = agree(world, adapter, algorithm, self.options)
            self.generation = world.generation
        self.choices = next(filter(None, choices), {})
        self._are_compared = True


def agree(
    comm: Communicator, adapter: ModelAdapter, algorithm: Algorithm[Any], options: Options
) -> Options:
    """Check that a learner's arguments are valid, and equal on all ranks. Collective.

    Returns:
        The options as plain numbers.
    Raises:
        SharedError: on all ranks, if an argument is invalid on any rank, or the ranks disagree.
    """
    parameters, optimizer = adapter.parameters, adapter.optimizer
    comm.together(lambda: _check_kinds(parameters, optimizer, algorithm))
    options = comm.together(lambda: options.checked(algorithm))
    comm.require_agreement(
        {
            "parallel_sgd version": __version__,
            **{field.name: getattr(options, field.name) for field in fields(options)},
            "number of parameters": parameters.flat.size,
            "layout of the parameters": parameters.shapes,
            "dtype of the parameters": str(parameters.dtype),
            **_facts_of("algorithm", algorithm),
            **_facts_of("optimizer", optimizer),
        }
    )
    return options


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
