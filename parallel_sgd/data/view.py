"""The learner and its communicator as protocols: all that a source of minibatches needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, TypeVar
from weakref import ref

from ..errors import UserError
from ..validation import kind_of
from .shares import Shares, Weights

Result = TypeVar("Result")


class RolledBack(Exception):
    """Raised into a source's pass when training has rolled back after a failure of ranks.

    The learner's feed raises this error, and the source restarts its pass from the learner's clock.
    """


class CommunicatorView(Protocol):
    """Rank, number of ranks, and the collectives used for agreement."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def fault_tolerant(self) -> bool: ...

    @property
    def world_ranks(self) -> Sequence[int]:
        """The numbers of the present ranks at the start."""

    def allgather_object(self, item: Any) -> list[Any]:
        """Return every rank's `item`, in rank order. Collective."""

    def require_agreement(self, facts: dict[str, Any]) -> None:
        """Raise a SharedError on all ranks if any fact differs between them. Collective."""

    def raise_together(self, problem: str | None) -> None:
        """Raise a SharedError on all ranks if any rank has a problem. Collective."""


class FeedView(Protocol):
    """One pass of a source over its minibatches, for one learner."""

    @property
    def samples(self) -> int:
        """Samples of all ranks before the next minibatch, trained on or waiting for a step."""

    @property
    def distributed(self) -> bool:
        """False in the warm start: every rank then gets the whole next minibatch."""

    def dealing(self, shares: Shares | None) -> AbstractContextManager[Weights | None]:
        """Return a `with` block in which the next minibatch is dealt to the ranks, and announced.

        Args:
            shares: of the source.
        Returns:
            A context manager with the ranks' weights; None for equal shares.
        """

    def announce(self, samples: int, total: int) -> None:
        """Record the next minibatch in the ledger, as issued.

        Args:
            samples: of this rank.
            total: samples of all ranks.
        Raises:
            RolledBack: training has rolled back.
        """

    def complete(self) -> None:
        """End the pass: every minibatch has been issued.

        Raises:
            RolledBack: training has rolled back.
        """

    @property
    def may_roll_back(self) -> bool:
        """True if training may roll back into the pass, even after its last minibatch. Local."""

    @property
    def trained(self) -> bool:
        """True once steps have been taken with every issued minibatch. May raise `RolledBack`."""

    def resume(self) -> None:
        """Continue from the learner's clock after a `RolledBack`.

        Minibatches issued earlier and not yet trained on are discarded.
        """

    def announce_discarded(self, samples: int) -> None:
        """Record in the ledger an issued minibatch of so many samples, not to be trained on."""


class SharesView(Protocol):
    """The ranks' shares of a learner's minibatches."""

    def measure(self) -> None:
        """Begin to measure the ranks' speeds.

        Raises:
            UserError: the ranks do not step together. The same on all ranks.
        """


class LearnerView(Protocol):
    """The attributes of a learner used by a source; any object with these attributes will do.

    The learner and its communicator must admit weak references. A learner with a true attribute
    `serves` has no part in the data and gets no minibatches.
    """

    @property
    def comm(self) -> CommunicatorView: ...

    @property
    def distributed(self) -> bool:
        """False during the warm start, when every rank gets the same full minibatch."""

    @property
    def samples(self) -> int:
        """Samples seen by all ranks so far."""

    def feed(self) -> AbstractContextManager[FeedView]:
        """Return a `with` block around a pass over minibatches.

        An exception marks the pass as abandoned.
        """

    @property
    def shares(self) -> SharesView:
        """The ranks' shares of minibatches."""

    def repeated(self, function: Callable[[], Result]) -> Result:
        """Run a collective function, again after every failure of ranks. Collective."""

    def fail(self, problem: str) -> NoReturn:
        """Raise a SharedError on all ranks: every rank is in `step`, or fails at the same time."""


def require_learner(learner: Any) -> None:
    """Check that a learner is given. Local.

    Raises:
        UserError: attributes of a `LearnerView` are missing.
    """
    if isinstance(learner, type) or not hasattr(learner, "comm") or not hasattr(learner, "feed"):
        raise UserError(f"learner must be an open Learner: it is {kind_of(learner)}")


def require_ranks(comm: Any) -> None:
    """Check that a communicator is given. Local.

    Raises:
        UserError: attributes of a `CommunicatorView` are missing.
    """
    if isinstance(comm, type) or not hasattr(comm, "raise_together"):
        raise UserError(
            f"comm must be a Communicator, such as Communicator.world(): it is {kind_of(comm)}"
        )


class Agreement:
    """A comparison of arguments by all ranks of a learner, made just now.

    Args:
        learner: the learner, after the comparison.
    """

    def __init__(self, learner: LearnerView) -> None:
        self._comm, self._progress = ref(learner.comm), _progress(learner)
        self._when = _when(learner)

    def holds(self, learner: LearnerView) -> bool:
        """Return whether no rank has to compare again. The same on all ranks. Local.

        Ranks that join have not compared. If ranks have failed, all others have compared if they
        have made progress together since: else the failure may have come in the midst of the
        comparison.
        """
        if self._comm() is not learner.comm:
            return False
        joined, generation = _when(learner)
        if joined != self._when[0]:
            return False
        return generation == self._when[1] or _progress(learner) > self._progress


def _when(learner: LearnerView) -> tuple[int, int]:
    """Return when ranks with data have joined last, and the generation of ranks."""
    joined: int = getattr(learner, "joined_generation", 0)
    return joined, getattr(learner.comm, "generation", 0)


def _progress(learner: LearnerView) -> int:
    """Return the progress of all ranks together: the clock, but for asynchronous workers."""
    progress: int = getattr(learner, "common_progress", learner.samples)
    return progress
