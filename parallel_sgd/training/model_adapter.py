"""The model adapter: connects a learner's flat parameters to the model that they belong to."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from ..algorithms import Algorithm
from ..algorithms.skipped import Skipped
from ..communication import Communicator
from ..local_step import LocalStep, UpdateRule
from ..parameters import Parameters
from ..state import StateReplaced
from .consistency import ConsistencyCheck, mark_of
from .minibatch_ledger import MinibatchLedger
from .recovery.base import Recovery
from .runner import AlgorithmRunner


class AdaptedLearner(Protocol):
    """The interface of a `Learner` for its model's adapter; documented there."""

    world: Communicator
    comm: Communicator
    algorithm: Algorithm[Any]
    gradient: Parameters
    local_step: LocalStep
    runner: AlgorithmRunner
    state: Any
    consistency: ConsistencyCheck
    ledger: MinibatchLedger
    recovery: Recovery
    skipped: Skipped

    @property
    def samples(self) -> int: ...

    @property
    def distributed(self) -> bool: ...

    @property
    def serves(self) -> bool: ...

    def ready(self, name: str) -> None: ...

    def fail(self, problem: str) -> NoReturn: ...


class Take(Protocol):
    """Takes a step with the gradient in the learner's vector; see `ModelAdapter.step`."""

    def __call__(self, samples: int, *, skip: bool = False) -> int: ...


class ModelAdapter:
    """The model behind a learner's parameters: here NumPy or CuPy arrays, with no other state.

    A subclass for a framework moves the framework's gradients into the learner's vector, and holds
    the state that a model has besides its parameters, such as buffers.

    Args:
        parameters: the model's trainable parameters.
        optimizer: the local update rule.

    Attributes:
        parameters, optimizer: as given; in a subclass valid from `prepare` on.
    """

    parameters: Parameters
    optimizer: UpdateRule
    _learner: AdaptedLearner | None = None  # once attached

    def __init__(self, parameters: Parameters, optimizer: UpdateRule) -> None:
        self.parameters, self.optimizer = parameters, optimizer

    @property
    def learner(self) -> AdaptedLearner:
        """The learner to which the model is attached. Local."""
        assert self._learner is not None, "the model is not attached to a learner"
        return self._learner

    def prepare(self, world: Communicator) -> None:
        """Make `parameters` and `optimizer`, and compare the model between ranks. Called again if
        ranks join.

        Raises:
            SharedError: on all ranks, if any rank's model cannot be trained, or models differ.

        Collective.
        """

    def bind(self) -> LocalStep:
        """Return the optimizer bound to the parameters. Local."""
        return self.optimizer.bind(self.parameters)

    def attach(self, learner: AdaptedLearner) -> None:
        """Connect the model with a learner that has been set up on its ranks. Called again after
        the ranks have changed. Collective."""
        self._learner = learner

    def detach(self) -> None:
        """Disconnect the model, before another setup or at the end. A second call does nothing.
        Local."""

    def step(self, samples: int, take: Take) -> int:
        """Take a step: move the model's gradients into the learner's vector, and call `take`.

        Args:
            samples: of this rank.
            take: called once with the samples; with `skip` only the clock advances.
        Returns:
            The result of `take`: the samples of all ranks.

        Collective, like the learner's step.
        """
        return take(samples)

    def gradient_mark(self) -> int:
        """Return the mark of this rank's gradient before the exchange: see `mark_of`. Local."""
        learner = self.learner
        return 0 if learner.algorithm.overlap else mark_of(learner.gradient.flat)

    def discard_minibatch(self) -> None:
        """Discard the results of a minibatch that will be issued again. Local."""

    def state_replaced(self, event: StateReplaced) -> None:
        """Drop what belongs to the state before. Local."""

    def finish(self) -> None:
        """Complete the model after the last step. Collective over the ranks that train."""

    @property
    def states(self) -> dict[str, Any]:
        """The model's state besides its parameters, by name, for checkpoints. Local."""
        return {}

    def arrays(self) -> dict[str, Any]:
        """Return the contents of a model file, by name: views of the parameters. Local."""
        return {name: self.parameters[name] for name in self.parameters}
