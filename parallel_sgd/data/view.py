"""What a source of minibatches must know of the learner that it feeds."""

from __future__ import annotations

from typing import Protocol


class CommunicatorView(Protocol):
    """This rank's number, and how many ranks there are."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class LearnerView(Protocol):
    """The learner as a source sees it; anything with these attributes will do."""

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

    @property
    def last_samples(self) -> int:
        """Samples of all ranks in the latest step; 0 says that every rank has run dry."""
        ...
