"""The one interface of all algorithms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from ..communication import Communicator
from ..errors import UserError
from ..optimizers import LocalStep
from ..parameters import Parameters

StateT = TypeVar("StateT")


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[StateT]):
    """How ranks train one model together.

    An algorithm is a frozen dataclass: its fields are the hyperparameters, and the command line,
    validation and `repr` come from them. What changes in training is the state that `init`
    returns. The clock of every option is samples seen by all ranks.
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
    ) -> int:
        """Train on one minibatch, in place.

        Args:
            state: from `init`; changed.
            parameters: the model, changed.
            gradient: summed over this rank's samples of the minibatch (zeros where it has none);
                what it holds afterwards is the algorithm's affair.
            samples: how many samples this rank put in, 0 or more.
            local_step: the optimizer; called with a summed gradient and its number of samples.
            comm: the ranks.
        Returns:
            The samples of all ranks in this minibatch; 0 says that every rank has run dry.

        Collective.
        """

    def finish(self, state: StateT, parameters: Parameters, comm: Communicator) -> None:
        """Complete what is under way, so that all ranks hold the final model. Collective."""

    def fail(self, state: StateT, problem: str, comm: Communicator) -> NoReturn:
        """End training for a problem of this rank, in place of the `step` that others call.

        Raises:
            UserError: here, and where the algorithm's `step` waits for all ranks, on all of them.
        """
        raise UserError(problem)

    def distributed(self, state: StateT) -> bool:
        """Whether ranks now train on parts of each minibatch, or all on the whole. Local."""
        return True

    def bytes_sent(self, state: StateT) -> int:
        """Bytes that this rank has sent to others for training so far. Local."""
        return 0
