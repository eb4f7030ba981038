"""The one interface of all algorithms: `init`, `step`, `finish`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from ..communication import AllTrain, Communicator, Group, Roles
from ..compression import problem_with
from ..exchange import Exchange
from ..optimizers import LocalStep
from ..options import Options
from ..parameters import Parameters
from .skipped import Skipped

Array = Any  #: a NumPy or CuPy array

StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Work:
    """What an algorithm works with, the same objects from `Algorithm.init` to the end.

    Attributes:
        parameters: the model, one flat vector [n] with named views.
        gradient: of the same layout: summed over this rank's samples of a minibatch.
        optimizer: the local update rule at work on the model. Called with a summed gradient and its
            number of samples it takes a step; it holds the clock, which goes on by the samples of
            all ranks.
        comm: the ranks that do what this one does: all, or where some only serve, the workers or
            the servers.
        group: who trains, and how they wait for each other.
        minibatch_size: samples of all ranks in a minibatch, where that is known before training.
        skipped: what is skipped since its numbers are not finite.
        choices: made by measurements, by name, the same on all ranks; plain values. A recovery
            carries them over, also to ranks that join, so that nothing is measured again.
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
        """Seen by all ranks so far: the clock of every option."""
        return self.optimizer.samples


class Minibatch(NamedTuple):
    """
    Attributes:
        samples: of this rank in it, 0 or more.
        total: of all ranks in it, as far as this one knows; more than 0 unless they train
            asynchronously.
    """

    samples: int
    total: int


class Algorithm(Options, ABC, Generic[StateT]):
    """How ranks train one model together.

    An algorithm is a frozen set of `options`. What changes in training is the state that `init`
    returns: see `parallel_sgd.state`. The learner does what all algorithms need: before `step` it
    sees that all ranks have come to the same minibatch and that none of them has a `problem`, and
    tells how many samples all have; where none has any, there is no step.

    Attributes:
        roles: who trains and who serves.
        distributed_after: the learner trains on the whole minibatch on every rank, without this
            algorithm, until so many samples have been seen (a warm start).
        synchronizes_every_step: whether ranks wait for each other in every step. Else they do so,
            before `step`, only where no source has announced how many samples all have, and nobody
            looks at the gradients.
        asynchronous: whether ranks go through the data each at its own pace, and know nothing of
            each other's samples.
        optimizer_on_servers: whether servers take the optimizer's steps, each on its part of the
            model, and not the ranks that train.
        overlap: whether it makes use of `ready`.
    """

    roles: Roles = AllTrain()
    distributed_after: int = 0
    synchronizes_every_step: bool = True
    asynchronous: bool = False
    optimizer_on_servers: bool = False
    overlap: bool = False

    @abstractmethod
    def init(self, work: Work) -> StateT:
        """The state before the first minibatch. Collective."""

    @abstractmethod
    def step(self, state: StateT, work: Work, minibatch: Minibatch) -> None:
        """Train on one minibatch, in place.

        Args:
            state: from `init`; changed.
            work: with the gradient of the minibatch (zeros where this rank has no samples); what
                the gradient holds afterwards is the algorithm's affair. The clock of its optimizer
                must go on by the samples of all ranks.
            minibatch: the numbers of samples.

        Every rank calls it for every minibatch in which any rank has samples.
        """

    def end_warm_start(self, state: StateT, work: Work) -> None:
        """`distributed_after` samples have been seen: all ranks go on from rank 0's model and
        optimizer. (Machines may round differently.) Collective."""
        work.optimizer.state.align(work.comm)
        for array in (work.parameters.flat, *work.optimizer.state.buffers.values()):
            work.comm.broadcast(array)

    def finish(self, state: StateT, work: Work) -> None:
        """Complete what is under way, so that all ranks hold the final model. Collective; all ranks
        have come to their end."""

    def shared_model(self, state: StateT, work: Work) -> Array:
        """The model [n] that all ranks have in common: for evaluation. Local, no copy."""
        return work.parameters.flat

    def replicated(self, state: StateT, work: Work) -> bool:
        """Whether the model that all ranks have in common is all that has been learned so far: from
        here any of them can go on without the others. Asked after a step; the same on all ranks.
        Local."""
        return True

    def reconfigured(self, state: StateT, work: Work) -> None:
        """The state has been put back, on other ranks than it was of. Collective."""

    def replicas(self, state: StateT, work: Work) -> Mapping[str, Array]:
        """What must have the same bits on all ranks beside `shared_model`, by name: compared now
        and then, where ranks wait for each other. Local, no copies."""
        return {}

    def skip(self, state: StateT, work: Work) -> tuple[int, int]:
        """Go back to where the ranks began to go by themselves, on all of them: `step` or `finish`
        has raised a `DivergedError`, of numbers that are not finite. The clock stays.

        For algorithms that do not synchronize in every step; those that do refuse a minibatch
        before `step`.

        Returns:
            How many minibatches are left out by that, and samples of all ranks.

        Collective, as far as it need be.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot leave out what it has begun")

    def resume(self, state: StateT, work: Work) -> None:
        """Ranks have died, and this one goes on from the state that it has: complete what it was in
        the midst of. For algorithms with servers. Local."""

    def ready(self, state: StateT, work: Work, name: str) -> None:
        """A parameter's gradient is complete on this rank, while others are still being computed.

        For algorithms that can make use of it before `step`. What the gradient holds of it belongs
        to the algorithm from here on. Local.
        """

    def sum_late(self, state: StateT, work: Work, vector: Array) -> None:
        """Replace a part of this minibatch's gradient that `ready` came too early for by (the
        decoded form of) its sum over all ranks: they add it before the update. With 32 bits here.
        Collective, between the exchange and the update. For algorithms with `overlap`."""
        exchange = Exchange(work.parameters, work.comm)
        exchange.sum(vector)
        exchange.close()

    def first_calls(self, x: Array) -> list[Callable[[], object]]:
        """Calls for `kernels.prepare` that need the algorithm's kernels, and do nothing else, so
        that no step waits for a compiler. What is not among them is compiled when it is needed.

        Args:
            x: no values [0] of the model's dtype, in NumPy.

        Local.
        """
        return [lambda: problem_with(x)]

    @property
    def quantizes_in_steps(self) -> bool:
        """Whether the optimizer may get gradients that an entropy code has quantized. Local."""
        return False

    def problem(self, state: StateT, work: Work, samples: int) -> str | None:
        """Why this rank's gradient, of so many samples, cannot be trained on, in one line; None
        where it can. Asked before the ranks agree on a minibatch. Local."""
        return problem_with(work.gradient.flat)
