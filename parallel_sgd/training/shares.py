"""Measured shares: the ranks divide minibatches in proportion to their speeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from .. import runtime
from ..algorithms import Algorithm
from ..communication import Communicator, Group
from ..data.shares import MEASURED, Shares, Weights, shares_after, weights_of
from ..errors import UserError
from ..state import StateReplaced
from .minibatch_ledger import MinibatchLedger
from .runner import AlgorithmRunner
from .step_timer import StepTimer

EVERY = 16  #: steps between two measurements, at least
SHARE = 1 << 10  #: of the mean rank, in whole numbers


class SharingLearner(Protocol):
    """The interface of a `Learner` for its shares; documented there."""

    algorithm: Algorithm[Any]
    comm: Communicator
    group: Group
    ledger: MinibatchLedger
    runner: AlgorithmRunner
    timer: StepTimer


class RankShares:
    """The ranks' shares of a learner's minibatches.

    With measured shares, every rank measures its own work: the time of its computing and updates,
    without waits for other ranks. After every `EVERY` steps, at a step after which all ranks hold
    the common model, the ranks gather their samples a second. These are the shares from the next
    minibatch that no rank has been dealt yet; later on the means of these and of the old shares, so
    that a single slow time moves them half way only.

    Args:
        learner: whose parts are used. A recovery may exchange these parts between two steps.

    Attributes:
        log: the measured weights by the samples from which they hold, equal ones at first; empty
            before a measurement. `Source` takes the log as `shares`, to repeat a run in every bit.

    Local, but for `stepped`.
    """

    def __init__(self, learner: SharingLearner) -> None:
        self._learner = learner
        self._dealing = runtime.Lock()  # held while a minibatch is dealt, and while ranks agree
        self._measures, self._steps, self._speed = False, 0, 0.0
        self.log: dict[int, Weights] = {}

    @contextmanager
    def dealing(self, shares: Shares | None) -> Iterator[Weights | None]:
        """Open a `with` block to deal the next minibatch. Yields the ranks' weights, or None for
        equal shares.

        Args:
            shares: of the source.
        """
        with self._dealing:
            if shares == MEASURED:
                yield shares_after(self.log, self._learner.ledger.end) if self.log else None
            elif isinstance(shares, Mapping):
                given = shares_after(shares, self._learner.ledger.end)
                yield weights_of(self._learner.comm.world_ranks, given)
            else:
                yield None

    def measure(self) -> None:
        """Begin to measure. The same on all ranks.

        Raises:
            UserError: the ranks do not step together.
        """
        algorithm = self._learner.algorithm
        if algorithm.has_quorum:
            raise UserError(
                f"shares={MEASURED!r} must be numbers with quorum or grace_s: the ranks agree on "
                "measured shares at the ends of blocks"
            )
        if algorithm.asynchronous or not algorithm.roles.together:
            raise UserError(
                f"shares={MEASURED!r} must be numbers, one for each rank that trains: the ranks of "
                f"{type(algorithm).__name__} do not step together"
            )
        self._measures = True

    def stepped(self) -> None:
        """Count a step; agree on new shares if it is time. Collective."""
        if not self._measures:
            return
        self._learner.timer.measure_work(self._learner.group)
        self._steps += 1
        runner = self._learner.runner
        if self._steps < EVERY or not runner.algorithm.replicated(runner.state, runner.work):
            return
        self._steps = 0
        with self._dealing:
            self._agree()

    def _agree(self) -> None:
        comm, ledger = self._learner.comm, self._learner.ledger
        samples, seconds = self._learner.timer.work()
        if samples and seconds > 0:  # a rank without samples keeps its speed of before
            self._speed = samples / seconds
        gathered = comm.allgather_object((ledger.end, self._speed))
        speeds = [speed for _, speed in gathered]
        if not all(speeds):
            return
        mean = sum(speeds) / len(speeds)
        shares = [SHARE * speed / mean for speed in speeds]
        if self.log:
            before = [*self.log.values()][-1]
            shares = [(old + new) / 2 for old, new in zip(before, shares, strict=True)]
        else:
            self.log[0] = (1,) * comm.size
        begin = max(end for end, _ in gathered)
        self.log[begin] = tuple(max(1, round(share)) for share in shares)

    def state_replaced(self, event: StateReplaced) -> None:
        """Forget the shares of later minibatches; all shares, if the ranks have changed. Local."""
        self._steps = 0
        kept = {} if event.ranks_changed else self.log
        self.log = {start: weights for start, weights in kept.items() if start <= event.clock}

    def report(self) -> dict[str, Any]:
        """Return the measured shares as JSON values; empty without. Local."""
        if not self.log:
            return {}
        return {"shares": {str(start): [*weights] for start, weights in self.log.items()}}
