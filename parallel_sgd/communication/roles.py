"""Roles of ranks: workers train, servers hold parameters; and how workers wait for each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from .communicator import Communicator

WHOLE_MINIBATCH = "samples of a minibatch before distributed_after"
"""Name of the sample count compared while every rank trains on the whole minibatch."""


class Group(ABC):
    """The ranks of a learner, each with its role.

    Attributes:
        world: all ranks.
        own: the ranks with the same role as this one: all ranks, the workers, or the servers.
        workers: world ranks of the workers.
    """

    world: Communicator
    own: Communicator
    workers: Sequence[int]

    @property
    def serves(self) -> bool:
        """True if this rank only serves. Local."""
        return False

    @abstractmethod
    def agree(self, problem: str | None, samples: int) -> int:
        """Wait for all workers and return the sum of their samples. Collective.

        Args:
            problem: description of this rank's problem in one line, or None.
            samples: number of samples of this rank.
        Raises:
            SharedError: on all ranks, if a rank has a problem or has called `fail`.
        """

    @abstractmethod
    def agree_on_whole(self, problem: str | None, samples: int) -> None:
        """Wait for all workers, each with the same whole minibatch. Collective.

        Raises:
            SharedError: as `agree`, and if the numbers of samples differ.
        """

    @abstractmethod
    def meet(self) -> None:
        """Check if any rank has called `fail`. Collective.

        Raises:
            SharedError: on all ranks, if so.
        """

    def meet_to_finish(self) -> None:
        """Call `meet`, unless the ranks meet anyway as they finish. Collective."""
        self.meet()

    @abstractmethod
    def fail(self, problem: str) -> NoReturn:
        """End training because of a problem of this rank.

        Raises:
            SharedError: on this rank now, and on all ranks at their next wait for all ranks.
        """

    def total_if_alike(self, samples: int) -> int:
        """Return the samples of all ranks in a step, if all workers are like this worker.

        Local; with several ranks in a worker, collective over them.
        """
        return samples * self.own.size

    def serve(self) -> None:
        """Serve the workers until all have finished, then take the final model."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")


class Roles(ABC):
    """Assignment of workers and servers, defined by an algorithm before a group exists."""

    together: bool = True
    """True if all ranks wait for each other in `Communicator.agree`, which compares their calls."""

    @abstractmethod
    def workers(self, comm: Communicator) -> list[list[int]]:
        """Return the ranks of each worker, ordered by worker number. Collective."""

    @abstractmethod
    def form(self, comm: Communicator, before: Group | None = None) -> Group:
        """Give every rank its role. Collective.

        Args:
            before: this rank's group before a failure; the rank keeps its role.
        """


class AllTrain(Roles):
    """All ranks train, and wait for each other in `Communicator.agree`."""

    def workers(self, comm: Communicator) -> list[list[int]]:
        return [[rank] for rank in range(comm.size)]

    def form(self, comm: Communicator, before: Group | None = None) -> Group:
        return AllRanks(comm)


@dataclass
class AllRanks(Group):
    """The group of an algorithm without servers: all ranks train."""

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
