"""Who trains and who serves, and how those who train wait for each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from .communicator import Communicator

WHOLE_MINIBATCH = "samples of a minibatch before distributed_after"
"""What must be the same on all ranks while each of them trains on the whole of it."""


class Group(ABC):
    """The ranks of a learner, each with its role.

    Attributes:
        world: all ranks.
        own: the ranks that do what this one does: all, or where some only serve, the workers or the
            servers.
        workers: the ranks that train, in the world.
    """

    world: Communicator
    own: Communicator
    workers: Sequence[int]

    @property
    def serves(self) -> bool:
        """Whether this rank only serves. Local."""
        return False

    @abstractmethod
    def agree(self, problem: str | None, samples: int) -> int:
        """Wait for all ranks that train; the sum of their samples. Collective.

        Raises:
            SharedError: on all ranks, if one has a problem or has called `fail`.
        """

    @abstractmethod
    def agree_on_whole(self, problem: str | None, samples: int) -> None:
        """Wait for all ranks that train, each with the same whole minibatch. Collective.

        Raises:
            SharedError: as `agree`, and if the ranks have not as many samples.
        """

    @abstractmethod
    def meet(self) -> None:
        """Find out whether a rank has called `fail`. Collective.

        Raises:
            SharedError: on all ranks, if one has.
        """

    def meet_to_finish(self) -> None:
        """`meet`, where the ranks do not meet anyway as they finish. Collective."""
        self.meet()

    @abstractmethod
    def fail(self, problem: str) -> NoReturn:
        """End training for a problem of this rank.

        Raises:
            SharedError: here, and where the others next wait for all ranks, on all of them.
        """

    def serve(self) -> None:
        """Serve the ranks that train until they all have finished, and take the final model."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")


class Roles(ABC):
    """Which ranks train and which serve: what an algorithm says, before there is a group."""

    together: bool = True
    """Whether all ranks wait for each other in `Communicator.agree`, where they see that they do
    the same."""

    @abstractmethod
    def workers(self, comm: Communicator) -> list[int]:
        """The ranks that train. Collective."""

    @abstractmethod
    def form(self, comm: Communicator, before: Group | None = None) -> Group:
        """Give every rank its role. Collective.

        Args:
            before: this rank's group, where some of its ranks have died: it keeps its role.
        """


class AllTrain(Roles):
    """All ranks train, and wait for each other in `Communicator.agree`."""

    def workers(self, comm: Communicator) -> list[int]:
        return list(range(comm.size))

    def form(self, comm: Communicator, before: Group | None = None) -> Group:
        return AllRanks(comm)


@dataclass
class AllRanks(Group):
    """The group in which all ranks train."""

    world: Communicator

    def __post_init__(self) -> None:
        self.own, self.workers = self.world, range(self.world.size)

    def agree(self, problem: str | None, samples: int) -> int:
        return self.own.agree(problem, samples)

    def agree_on_whole(self, problem: str | None, samples: int) -> None:
        self.own.agree(problem, samples, equal={WHOLE_MINIBATCH: samples})

    def meet(self) -> None:
        self.own.agree(None)

    def fail(self, problem: str) -> NoReturn:
        self.own.agree(problem)
        raise AssertionError("unreachable")
