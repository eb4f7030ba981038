"""What a source of minibatches must know of the learner that it feeds."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol


class CommunicatorView(Protocol):
    """This rank's number, how many ranks there are, and how they come to one mind."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather_object(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective."""
        ...

    def require_agreement(self, facts: dict[str, Any]) -> None:
        """Raise a SharedError on all ranks if any fact differs between them. Collective."""
        ...

    def raise_together(self, problem: str | None) -> None:
        """Raise a SharedError on all ranks if any of them has a problem. Collective."""
        ...


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
        ...

    @property
    def samples(self) -> int:
        """Samples seen by all ranks so far."""
        ...

    def expect(self, samples: int, total: int) -> None:
        """Be told what a coming step gets: samples of this rank, and of all ranks."""
        ...

    def expect_nothing(self) -> None:
        """Forget what no step has taken."""
        ...

    def fail(self, problem: str) -> NoReturn:
        """Raise a SharedError on all ranks: they are in `step`, or fail at the same time."""
        ...
