"""What a source and a learner tell each other over one pass of the data."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from ..algorithms import Algorithm
from ..data.view import RolledBack
from .minibatch_ledger import MinibatchLedger, Pass
from .recovery.base import Recovery


class Feed(Pass):
    """One pass of a source over its minibatches, for one learner; a `with` block around it.

    Args:
        announced: the learner's.
        algorithm: the learner's.
        fail: the learner's.
        recovery: the learner's.
    """

    def __init__(
        self,
        announced: MinibatchLedger,
        algorithm: Algorithm[Any],
        fail: Callable[[str], NoReturn],
        recovery: Recovery,
    ) -> None:
        super().__init__()
        self._announced, self._algorithm, self._fail = announced, algorithm, fail
        self._recovery = recovery

    @property
    def samples(self) -> int:
        """Of all ranks, up to where the next minibatch begins."""
        return self._announced.end

    @property
    def distributed(self) -> bool:
        """Whether each rank gets its part of the next minibatch; else it is in the warm start."""
        return self._announced.end >= self._algorithm.distributed_after

    def complete(self) -> None:
        """All has been given: see that all ranks have trained on it. Collective where ranks survive
        each other, else local.

        Raises:
            RolledBack: they have gone back.
        """
        self._require_going_on()
        if self._announced.complete and self._recovery.end_pass():
            self.rewound = False
        self._require_going_on()

    @property
    def may_rewind(self) -> bool:
        """Training may go back into the pass, also after all of it was given. Local."""
        return self._recovery.ranks_may_change

    @property
    def trained(self) -> bool:
        """Whether steps have been taken with all that was given. May raise `RolledBack`. Local."""
        self._require_going_on()
        return self._announced.complete

    def resume(self) -> None:
        """Go on from where training has gone back to. What was given before, and is yet to come to
        a step, stays void. Local."""
        self.rewound = False

    def announce_discarded(self, samples: int) -> None:
        """Announce something of so many samples that no step trains on. Local."""
        self._announced.add_discarded(samples, self)

    def _require_going_on(self) -> None:
        if self.rewound:
            raise RolledBack

    def announce(self, samples: int, total: int) -> None:
        """Announce the minibatch that is given next: samples of this rank, and of all ranks.

        Raises:
            RolledBack: training has gone back, and with it the place in the data.
        """
        self._require_going_on()
        if self._announced.feed is not self:
            self._fail(
                "a source's minibatches must not be gone on with after another source has begun, "
                "training has failed, or a checkpoint was loaded: take them anew from the source"
            )
        self._announced.add(samples, total, self)

    def __enter__(self) -> Feed:
        self._announced.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self._announced.ended(self)
        else:  # left in the midst of it
            self._announced.forget(self)
