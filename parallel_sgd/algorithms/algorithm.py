"""The one interface of all algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

from ..communication import Communicator
from ..optimizers import LocalStep
from ..parameters import Parameters

Array = Any  #: a NumPy or CuPy array

StateT = TypeVar("StateT")


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[StateT]):
    """How ranks train one model together.

    An algorithm is a frozen dataclass: its fields are the hyperparameters, and the command line,
    validation and `repr` come from them. What changes in training is the state that `init`
    returns: see `parallel_sgd.state`. The clock of every option is samples seen by all ranks,
    `local_step.samples`.
    """

    agrees: ClassVar[bool] = True
    """Whether ranks wait for each other in `Communicator.agree`, and see there that they do the
    same."""

    def check_minibatch(self, samples: int, ranks: int) -> None:
        """See that minibatches of so many samples of all ranks can be trained on. Local.

        Raises:
            SharedError: they cannot, with these options; alike on all ranks.
        """

    @abstractmethod
    def init(self, parameters: Parameters, comm: Communicator) -> StateT:
        """The state before the first minibatch. Collective."""

    @abstractmethod
    def step(
        self,
        state: StateT,
        parameters: Parameters,
        gradient: Parameters,
        samples: int,
        local_step: LocalStep,
        comm: Communicator,
        total: int | None = None,
    ) -> int:
        """Train on one minibatch, in place.

        Args:
            state: from `init`; changed.
            parameters: the model, changed.
            gradient: summed over this rank's samples of the minibatch (zeros where it has none);
                what it holds afterwards is the algorithm's affair.
            samples: how many samples this rank put in, 0 or more.
            local_step: the optimizer, called with a summed gradient and its number of samples. It
                holds the clock, which must go on by the samples of all ranks.
            comm: the ranks.
            total: the samples of all ranks in this minibatch, the same on all, where a source has
                told; None: only communication can tell. For algorithms that do not communicate in
                every step; the others may find out for themselves.
        Returns:
            The samples of all ranks in this minibatch, as far as this one knows; 0 says that every
            rank has run dry, or where they train apart that this one has.

        Every rank calls it for every minibatch.
        """

    def ready(
        self,
        state: StateT,
        parameters: Parameters,
        gradient: Parameters,
        name: str,
        local_step: LocalStep,
    ) -> None:
        """A parameter's gradient is complete on this rank, while others are still being computed.

        For algorithms that can make use of it before `step`. What `gradient` holds of it belongs to
        the algorithm from here on. Local.
        """

    @property
    def apart(self) -> bool:
        """Whether ranks go through the data each at its own pace, and meet at the end only."""
        return False

    def workers(self, comm: Communicator) -> list[int]:
        """The ranks that train; others only serve them. Collective."""
        return list(range(comm.size))

    def tables_of(self, state: StateT) -> Mapping[str, Any]:
        """Embedding tables that are distributed over servers, by name. Local."""
        return {}

    def write_elsewhere(self, state: StateT, folder: str) -> dict[str, Any]:
        """Have others write what they hold of the state that was collected, in a folder.

        Returns:
            Size and checksum of every file, by name.

        Called by the first rank, in the background of its training.
        """
        return {}

    def check_elsewhere(self, state: StateT, folder: str) -> None:
        """See that what others have written can be read. Called by the first rank, before anything
        of a learner has changed.

        Raises:
            UserError: it cannot.
        """

    def check_saved(
        self,
        state: StateT,
        saved: Mapping[str, Any],
        parameters: Parameters,
        local_step: LocalStep,
        ranks: int,
    ) -> None:
        """See that a saved state means something, before anything of a learner has changed. Local.

        Args:
            saved: its fields by name, of the types, dtypes and numbers of axes of the present ones;
                states in it are mappings too. On another number of ranks, what they make of it.
            ranks: that wrote it.
        Raises:
            UserError: naming what is not possible.
        """

    def read_elsewhere(self, state: StateT, folder: str) -> None:
        """Have others read what they have written. Called by the first rank."""

    def report(self, state: StateT) -> dict[str, Any] | None:
        """What else this rank can tell of its training so far, as JSON can hold it. Local."""
        return None

    def group(self, state: StateT, comm: Communicator) -> Communicator:
        """The ranks that do what this one does: all, or where some only serve, the workers or the
        servers. `step` and the rest get these. Local."""
        return comm

    def serves(self, state: StateT) -> bool:
        """Whether this rank calls `serve` instead of `step` and `finish`. Local."""
        return False

    def bind(self, state: StateT, local_step: LocalStep) -> None:
        """Get to know the optimizer, before anything is asked of the algorithm. Local."""

    def serve(
        self, state: StateT, parameters: Parameters, local_step: LocalStep, comm: Communicator
    ) -> None:
        """Serve the ranks that train until they all have finished, and take the final model."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")

    def finish(
        self, state: StateT, parameters: Parameters, local_step: LocalStep, comm: Communicator
    ) -> None:
        """Complete what is under way, so that all ranks hold the final model. Collective."""
        self.meet(state, comm)

    def shared_model(self, state: StateT, parameters: Parameters) -> Array:
        """The model [n] that all ranks have in common: for evaluation. Local, no copy."""
        return parameters.flat

    def wait(self, state: StateT) -> None:
        """Wait for what runs in the background, so that the state is whole; training is not
        affected. Local."""

    def close(self, state: StateT, comm: Communicator, *, failed: bool = False) -> None:
        """Give back what `init` has taken beside memory: communicators, threads.

        Args:
            failed: training has ended with an error that all ranks share: only what all of them
                have begun is waited for.

        Called once; then there is nothing more but questions about what was (`report`). Collective.
        """
        self.wait(state)

    def collect(
        self, state: StateT, parameters: Parameters, local_step: LocalStep, comm: Communicator
    ) -> None:
        """Bring into the state what of it is elsewhere, with servers, so that a checkpoint can
        hold it; training is not affected. Collective where there is such."""
        self.wait(state)

    def restored(
        self, state: StateT, parameters: Parameters, local_step: LocalStep, comm: Communicator
    ) -> None:
        """Go on from a state that has been put back. Collective where servers must know."""

    def meet(self, state: StateT, comm: Communicator) -> None:
        """Find out whether a rank has called `fail`. Collective.

        Raises:
            SharedError: on all ranks, if one has.
        """
        comm.agree(None)

    def fail(self, state: StateT, problem: str, comm: Communicator) -> NoReturn:
        """End training for a problem of this rank, in place of the `step` that others call.

        For algorithms whose ranks wait for each other first in `Communicator.agree`.

        Raises:
            SharedError: here, and where the others next wait for all ranks, on all of them.
        """
        comm.agree(problem)
        raise AssertionError("unreachable")

    def distributed(self, samples: int) -> bool:
        """Whether ranks train on parts of each minibatch, or all on the whole, after so many
        samples. Local."""
        return True

    def weight(self, state: StateT) -> int:
        """What this rank's `parameters` count beside the others' where a checkpoint is taken up by
        another number of ranks: 1 where all are the same, else the samples in them. Local."""
        return 1

    def bytes_sent(self, state: StateT) -> int:
        """Bytes that this rank has sent to others for training so far (and has got from parameter
        servers, whose own are 0). Local."""
        return 0
