"""What a source of minibatches must know of the learner that it feeds."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

from ..errors import UserError
from ..validation import kind_of


class Rewound(Exception):
    """Ranks have died, and the learner has gone back: its minibatches are dealt out anew from
    there. A feed tells it a source, which begins its pass again."""


class CommunicatorView(Protocol):
    """This rank's number, how many ranks there are, and how they come to one mind."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def fault_tolerant(self) -> bool: ...

    def allgather_object(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective."""

    def require_agreement(self, facts: dict[str, Any]) -> None:
        """Raise a SharedError on all ranks if any fact differs between them. Collective."""

    def raise_together(self, problem: str | None) -> None:
        """Raise a SharedError on all ranks if any of them has a problem. Collective."""


class FeedView(Protocol):
    """One pass of a source over its minibatches, for one learner."""

    @property
    def samples(self) -> int:
        """Of all ranks, up to where the next minibatch begins, whether they have been trained on or
        wait for their step."""

    @property
    def distributed(self) -> bool:
        """False where the next minibatch is of the warm start: every rank gets it whole."""

    def announce(self, samples: int, total: int) -> None:
        """Announce what is given next: samples of this rank, and of all ranks. May raise
        `Rewound`."""

    def complete(self) -> None:
        """All has been given. May raise `Rewound`."""

    @property
    def may_rewind(self) -> bool:
        """Training may go back into the pass, also after all of it was given. Local."""

    @property
    def trained(self) -> bool:
        """Whether steps have been taken with all that was given. May raise `Rewound`."""

    def begin_again(self) -> None:
        """After a `Rewound`: go on from where the learner stands. What was given before, and is yet
        to come to a step, is not trained on."""

    def announce_discarded(self, samples: int) -> None:
        """Announce something of so many samples that no step trains on."""


class LearnerView(Protocol):
    """The learner as a source sees it; anything with these attributes will do.

    It and its communicator must admit weak references. One that has a true attribute `serves` has
    no part in the data: it gets no minibatches.
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
        """A `with` block around a pass over minibatches; an exception says that it was left."""

    def fail(self, problem: str) -> NoReturn:
        """Raise a SharedError on all ranks: they are in `step`, or fail at the same time."""


def require_learner(learner: Any) -> None:
    """Refuse what is no learner, where one is to be fed. Local.

    Raises:
        UserError: it has not what a `LearnerView` has.
    """
    if isinstance(learner, type) or not hasattr(learner, "comm") or not hasattr(learner, "feed"):
        raise UserError(f"learner must be an open Learner: it is {kind_of(learner)}")


def require_ranks(comm: Any) -> None:
    """Refuse what is no communicator. Local.

    Raises:
        UserError: it has not what a `CommunicatorView` has.
    """
    if isinstance(comm, type) or not hasattr(comm, "raise_together"):
        raise UserError(
            f"comm must be a Communicator, such as Communicator.world(): it is {kind_of(comm)}"
        )
