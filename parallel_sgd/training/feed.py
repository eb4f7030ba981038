"""Feed: the link between a source and a learner, over one pass of the data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn

from ..algorithms import Algorithm
from ..data.shares import Shares, Weights
from ..data.view import RolledBack
from .minibatch_ledger import MinibatchLedger, Pass
from .recovery.base import Recovery
from .shares import RankShares


class Feed(Pass):
    """One pass of a source over its minibatches, for one learner; used as a `with` block.

    Args:
        ledger: the learner's.
        algorithm: the learner's.
        shares: the learner's.
        fail: the learner's.
        recovery: the learner's.
    """

    def __init__(
        self,
        ledger: MinibatchLedger,
        algorithm: Algorithm[Any],
        shares: RankShares,
        fail: Callable[[str], NoReturn],
        recovery: Recovery,
    ) -> None:
        super().__init__()
        self._ledger, self._algorithm, self._fail = ledger, algorithm, fail
        self._shares, self._recovery = shares, recovery

    @property
    def samples(self) -> int:
        """Samples of all ranks before the next minibatch."""
        return self._ledger.end

    @property
    def distributed(self) -> bool:
        """True if the ranks split the next minibatch; False in the warm start."""
        return self._ledger.end >= self._algorithm.distributed_after

    def dealing(self, shares: Shares | None) -> AbstractContextManager[Weights | None]:
        """Open a `with` block in which the next minibatch is dealt to the ranks, and announced.

        Args:
            shares: of the source.
        Returns:
            A context manager with the ranks' weights; None for equal shares. Other threads cannot
            change the shares within the block.
        """
        return self._shares.dealing(shares)

    def complete(self) -> None:
        """Check that all ranks have trained on every minibatch of the pass. Collective with
        fault-tolerant ranks, otherwise local.

        Raises:
            RolledBack: training has rolled back.
        """
        self._require_going_on()
        if self._ledger.complete and self._recovery.end_pass():
            self.rewound = False
        self._require_going_on()

    @property
    def may_roll_back(self) -> bool:
        """True if training may roll back into the pass, also after its last minibatch. Local."""
        return self._recovery.ranks_may_change

    @property
    def trained(self) -> bool:
        """True if steps have taken every issued minibatch. May raise `RolledBack`. Local."""
        self._require_going_on()
        return self._ledger.complete

    def resume(self) -> None:
        """Continue from the point of the rollback. Minibatches issued before, and not yet taken,
        stay discarded. Local."""
        self.rewound = False

    def announce_discarded(self, samples: int) -> None:
        """Announce a minibatch of `samples` samples that no step will train on. Local."""
        self._ledger.add_discarded(samples, self)

    def _require_going_on(self) -> None:
        if self.rewound:
            raise RolledBack

    def announce(self, samples: int, total: int) -> None:
        """Announce the next minibatch: samples of this rank, and of all ranks.

        Raises:
            RolledBack: training has rolled back, and so has the position in the data.
        """
        self._require_going_on()
        if self._ledger.feed is not self:
            self._fail(
                "minibatches of a source must not be continued after another source has begun, "
                "training has failed, or a checkpoint was loaded: iterate over the source again"
            )
        self._ledger.add(samples, total, self)

    def __enter__(self) -> Feed:
        self._ledger.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self._ledger.ended(self)
        else:  # the block was left early
            self._ledger.abandon(self)
