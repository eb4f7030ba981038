"""The interface of all algorithms: `init`, `step`, `finish`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from ..communication import AllTrain, Communicator, Group, Roles
from ..compression import problem_with
from ..exchange import Exchange
from ..local_step import LocalStep
from ..options import Options
from ..parameters import Parameters
from .skipped import Skipped

Array = Any  #: a NumPy or CuPy array

StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Work:
    """The objects that an algorithm works with, the same from `Algorithm.init` to the end.

    Attributes:
        parameters: the model: a flat vector [n] with named views.
        gradient: same layout, summed over this rank's samples of a minibatch.
        optimizer: the local update rule, bound to the model. A call with a summed gradient and its
            number of samples takes a step. Its clock advances by the samples of all ranks.
        comm: the ranks with this rank's role: all ranks, or with servers the workers or the
            servers.
        group: the ranks that train, and their way of waiting for each other.
        minibatch_size: samples of all ranks in a minibatch, if known before training.
        skipped: the policy for non-finite values.
        choices: of measurements, by name: plain values, the same on all ranks. A recovery keeps the
            choices, and sends them to ranks that join, so that no measurement is repeated.
    """

    parameters: Parameters
    gradient: Parameters
    optimizer: LocalStep
    comm: Communicator
    group: Group
    minibatch_size: int | None = None
    skipped: Skipped = field(default_factory=Skipped)
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples seen by all ranks so far: the clock of every option."""
        return self.optimizer.samples


class Minibatch(NamedTuple):
    """Numbers of samples in a minibatch.

    Attributes:
        samples: on this rank, 0 or more.
        total: on all ranks, as far as this rank knows. More than 0 unless ranks train
            asynchronously.
    """

    samples: int
    total: int


class Algorithm(Options, ABC, Generic[StateT]):
    """A method of training a model on several ranks.

    An algorithm is a frozen set of `options`. All data that changes in training is in the state
    returned by `init`: see `parallel_sgd.state`. The learner does the work common to all
    algorithms. Before `step` the learner checks that all ranks are at the same minibatch and that
    no rank has a `problem`, and sums the ranks' samples. A minibatch without any samples has no
    step.

    Attributes:
        roles: assigns ranks to training and serving.
        distributed_after: number of samples of a warm start. Until then the learner trains on the
            whole minibatch on every rank, without this algorithm.
        synchronizes_every_step: True if ranks wait for each other in every step. Otherwise ranks
            wait before `step` only if no source announces the samples of all ranks, and `problem`
            is not called.
        asynchronous: True if each rank goes through the data at its own pace, without knowledge of
            the samples on the remaining ranks.
        optimizer_on_servers: True if servers take the optimizer's steps, each on its part of the
            model.
        overlap: True if the algorithm uses `ready`.
        has_quorum: True if no step waits for ranks that are late. The samples of all ranks must
            then be announced, and ranks call `arrive` before they wait for all others.
        has_common_model: False if ranks only approach each other between steps, as by gossip: each
            has a model of its own, and `finish` makes one of them. Then the ranks compare no
            models, and each evaluates its own.
    """

    roles: Roles = AllTrain()
    distributed_after: int = 0
    synchronizes_every_step: bool = True
    asynchronous: bool = False
    optimizer_on_servers: bool = False
    overlap: bool = False
    has_quorum: bool = False
    has_common_model: bool = True

    @abstractmethod
    def init(self, work: Work) -> StateT:
        """Return the state before the first minibatch. Collective."""

    @abstractmethod
    def step(self, state: StateT, work: Work, minibatch: Minibatch) -> None:
        """Train on a minibatch, in place.

        Args:
            state: from `init`; changed.
            work: with the gradient of the minibatch (zeros if this rank has no samples). The
                algorithm may overwrite the gradient. The clock of the optimizer must advance by the
                samples of all ranks.
            minibatch: the numbers of samples.

        Called on every rank for every minibatch with samples on any rank.
        """

    def end_warm_start(self, state: StateT, work: Work) -> None:
        """End the warm start: all ranks continue from rank 0's model and optimizer. Collective.

        Called after `distributed_after` samples. Machines may round differently, so the ranks'
        models may differ slightly.
        """
        work.optimizer.state.align(work.comm)
        for array in (work.parameters.flat, *work.optimizer.state.buffers.values()):
            work.comm.broadcast(array)

    def arrive(self, state: StateT, work: Work, *, problem: bool = False) -> None:
        """Prepare to wait for all ranks outside of steps, to evaluate, save, load or finish.

        With a quorum other ranks may still be in earlier steps. Afterwards the common model is the
        same on all ranks. The default does nothing.

        Args:
            problem: this rank is about to tell the other ranks of a problem, instead.
        """

    def finish(self, state: StateT, work: Work) -> None:
        """Complete the work under way, so that all ranks hold the final model.

        Collective, after the last minibatch on all ranks.
        """

    def shared_model(self, state: StateT, work: Work) -> Array:
        """Return the model [n] common to all ranks, for evaluation. Local, no copy.

        Without a common model, this rank's own.
        """
        return work.parameters.flat

    def replicated(self, state: StateT, work: Work) -> bool:
        """Return True if the common model contains all learning so far.

        Any rank can then continue training without the rest. Called after a step. Local; the same
        on all ranks.
        """
        return True

    def reconfigured(self, state: StateT, work: Work) -> None:
        """Adapt a restored state to a different set of ranks. Collective."""

    def replicas(self, state: StateT, work: Work) -> Mapping[str, Array]:
        """Return the arrays, besides `shared_model`, that must be bit-equal on all ranks, by name.

        The learner compares them at intervals, whenever ranks wait for each other. Local, no
        copies.
        """
        return {}

    def skip(self, state: StateT, work: Work) -> tuple[int, int]:
        """Return to the start of the present local period, on all its ranks.

        Called after `step` or `finish` has raised a `DivergedError` because of non-finite values.
        The clock keeps its value. Only for algorithms that do not synchronize in every step. All
        other algorithms refuse a minibatch before `step`.

        Returns:
            The number of skipped minibatches, and their samples on all ranks.

        Collective, if ranks share the period. Local for a worker of parameter servers.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot skip a minibatch that has begun")

    def resume(self, state: StateT, work: Work) -> None:
        """Complete the work that a failure of ranks has interrupted, from this rank's state.

        For algorithms with servers. Local.
        """

    def ready(self, state: StateT, work: Work, name: str) -> None:
        """Process a parameter's gradient, complete on this rank while backward continues.

        From now on the gradient of this parameter belongs to the algorithm. Not called in the warm
        start, nor for algorithms without `overlap`. Local.
        """

    def sum_late(self, state: StateT, work: Work, vector: Array) -> None:
        """Replace late gradient values by (the decoded form of) their sum over all ranks.

        `ready` was called before these values of the minibatch were complete. The caller adds the
        sum before the update. The default sums in 32 bits. Collective, between the exchange and the
        update. For algorithms with `overlap`.

        Args:
            vector: [n], the late values; on return their sum.
        """
        exchange = Exchange(work.parameters, work.comm)
        exchange.sum(vector)
        exchange.close()

    def first_calls(self, x: Array) -> list[Callable[[], object]]:
        """Return calls for `kernels.prepare` that compile the algorithm's kernels, without effect.

        So no step waits for a compiler. Kernels outside of the list are compiled on first use.

        Args:
            x: an array without values, [0], of the model's dtype, in NumPy.

        Local.
        """
        return [lambda: problem_with(x)]

    @property
    def quantizes_in_steps(self) -> bool:
        """True if the optimizer may receive gradients quantized by an entropy code. Local."""
        return False

    def problem(self, state: StateT, work: Work, samples: int) -> str | None:
        """Return why this rank's gradient cannot be trained on, in a line, or None.

        Args:
            samples: of this rank in the minibatch.

        Called before the ranks agree on a minibatch. Local.
        """
        return problem_with(work.gradient.flat)
