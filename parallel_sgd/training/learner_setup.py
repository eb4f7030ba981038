"""The parts of a learner, and their setup on the ranks: at the start, and again after rank
failures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from ..algorithms import Algorithm, Work
from ..algorithms.skipped import Skipped
from ..communication import Communicator, Group
from ..communication.liveness.rank_status import report_training
from ..errors import UserError
from ..kernels import array_module
from ..optimizers import UpdateRule
from ..parameter_server import RemoteTables
from ..parameters import Parameters
from ..state import Cause, Component, StateReplaced, components
from .arguments import agree_on_arguments, require_communicator
from .background_tasks import BackgroundTasks
from .consistency import EVERY, ConsistencyCheck, mark_of
from .minibatch_ledger import MinibatchLedger
from .non_finite import MOST_SKIPPED, NotFinite, agree_on_numbers
from .preparing import prepare_kernels
from .recovery.base import NoRecovery, Recovery, begin_with_remaining
from .recovery.rollback import COMMIT_EVERY, Rollback
from .recovery.server_failover import ServedLearner, ServerFailover
from .runner import AlgorithmRunner
from .shared_model import SharedModel
from .sync_stats import SyncPerformance

AS_MADE = "it stays what the learner was made with: close this one, and make another"

FIXED = dict.fromkeys(
    (
        *("optimizer", "algorithm", "comm", "world", "local_step"),
        *("sync_perf_stats", "minibatch_size", "commit_every"),
        *("not_finite", "most_skipped", "compare_every"),
    ),
    AS_MADE,
) | {
    "gradient": "fill it in place, learner.gradient.flat[...] = gradient.flat",
    "parameters": "change them in place, learner.parameters.flat[...] = parameters.flat",
    "lr": "the optimizer has it; give that a schedule (parallel_sgd.schedules), or set group['lr'] "
    "of a PyTorch optimizer's param_groups",
}
"""Attributes that a program must not assign, because the new value would have no effect, each with
the correct alternative. Assigning the present value again is allowed."""

_NOTHING = object()


class LearnerSetup(ABC):
    """Holds the parts of a `Learner`. `Learner` documents the arguments and attributes.

    Args: those of `Learner`.
    """

    fixed = FIXED  #: as `FIXED`, for this class of learner
    _is_made = False  # False during setup and reconfiguration, when attributes may be assigned

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed and self._is_made and value is not getattr(self, name, _NOTHING):
            raise UserError(f"learner.{name} = ... would have no effect: {self.fixed[name]}")
        object.__setattr__(self, name, value)

    def __init__(
        self,
        parameters: Parameters,
        optimizer: UpdateRule,
        algorithm: Algorithm[Any],
        comm: Communicator,
        *,
        sync_perf_stats: int = 0,
        minibatch_size: int | None = None,
        commit_every: int = COMMIT_EVERY,
        not_finite: NotFinite = "stop",
        most_skipped: int = MOST_SKIPPED,
        compare_every: int = EVERY,
    ) -> None:
        self._arguments = parameters, optimizer, algorithm, sync_perf_stats, commit_every
        self._about_numbers = not_finite, most_skipped, compare_every, minibatch_size
        self.parameters, self.algorithm, self.world = parameters, algorithm, comm
        self.skipped = Skipped()
        self._performance: SyncPerformance | None = None
        self.recovery: Recovery = NoRecovery()
        self.stripe_sizes: Sequence[Mapping[str, int]] = []  # of all fault-tolerant ranks
        self._group: Group | None = None
        self.choices: dict[str, Any] | None = None  # by measurements; None: nothing is agreed yet
        self.agreed_at = 0  # the generation of ranks in which arguments were compared last
        self._number = 0
        if isinstance(comm, Communicator):  # anything else is refused below
            comm.require_whole()
            self._number = comm.learners
        begin_with_remaining(comm, self._begin)
        comm.learners += 1
        self._is_made = True

    def _begin(self) -> None:
        """Check the arguments and set up all parts. Collective."""
        comm, algorithm = self.world, self.algorithm
        require_communicator(comm)
        self._agree()
        every, commit_every = self._checked
        self.gradient = self.parameters.like()
        self.local_step = self._arguments[1].bind(self.parameters)
        x = self.parameters.flat
        if array_module(x) is np:
            steps = self.local_step.first_calls(quantized=algorithm.quantizes_in_steps)
            calls = algorithm.first_calls(x[:0].copy()) + steps
            prepare_kernels(comm, calls)
        self._ledger = MinibatchLedger(algorithm, self.local_step)
        self._form_group()
        self._watch_performance(every)
        self._sent_before = 0  # by the learner of the loaded checkpoint
        self._computes_since: float | None = None  # start of the user's computing
        self._background_tasks = BackgroundTasks(self.fail)
        self._closed, self._shared = False, SharedModel()
        if comm.fault_tolerant and algorithm.roles.together:
            self.recovery = Rollback(self, commit_every)
        elif comm.fault_tolerant and not isinstance(self.recovery, ServerFailover):
            # Made once: if ranks fail during setup, the failover still knows this rank's shards.
            self.recovery = ServerFailover(cast(ServedLearner, self))
        self.recovery.begin()
        report_training()

    def _agree(self) -> None:
        """Compare the arguments of all ranks, if any rank has joined since the latest comparison.

        Choices by measurements are carried over to ranks that join. Collective.
        """
        held = self.world.allgather_object((self.choices, self.agreed_at))
        self.agreed_at = max(generation for _, generation in held)
        if any(choices is None for choices, _ in held):
            self._compare_arguments()
            self.agreed_at = self.world.generation
        self.choices = next((choices for choices, _ in held if choices), {})

    def _compare_arguments(self) -> None:
        """Check the arguments, also for equality on all ranks. Collective."""
        self._checked = agree_on_arguments(self.world, *self._arguments)
        numbers = agree_on_numbers(self.world, self.algorithm, *self._about_numbers)
        self.skipped.skips, self.skipped.most, self._compare_every, self._minibatch_size = numbers

    def _form_group(self) -> None:
        """Give every rank its role, and make the state before the first minibatch. Collective."""
        x, step, size = self.parameters, self.local_step, self._minibatch_size
        self.group = self._group = self.algorithm.roles.form(self.world, self._group)
        self.comm = self.group.own
        self.world.broadcast(x.flat)
        assert self.choices is not None
        work = Work(x, self.gradient, step, self.comm, self.group, size, self.skipped, self.choices)
        self.runner = AlgorithmRunner(self.algorithm, work)
        self.state = self.runner.state
        self.consistency = self._new_consistency_check()

    def _watch_performance(self, every: int) -> None:
        """Start performance lines on the first rank that trains: after a failure this may be a new
        rank. Local."""
        comm = self.world
        if every and comm.rank == self.group.workers[0] and self._performance is None:
            comm.trace = self.group.own.trace = self._performance = SyncPerformance(
                every,
                comm.trace,
                rank=comm.world_ranks[comm.rank],
                ranks=len(self.group.workers),
                asynchronous=self.algorithm.asynchronous,
            )

    def _new_consistency_check(self) -> ConsistencyCheck:
        parts = self.runner, self.local_step, self._ledger
        check = ConsistencyCheck(self._number, *parts, self._gradient_mark, self._compare_every)
        before: ConsistencyCheck | None = getattr(self, "consistency", None)
        if before is not None:
            check.compares = before.compares
        return check

    def _gradient_mark(self) -> int:
        """Return the mark of this rank's gradient before the exchange: see `mark_of`. Local."""
        return 0 if self.algorithm.overlap else mark_of(self.gradient.flat)

    def abandon(self) -> None:
        """Wait for the end of all background work, after a rank failure has made this work fail.
        Local."""
        # bounded: waits for work of this rank, whose own waits are bounded
        self._background_tasks.wait()
        self.runner.abandon()

    def reconfigure(self) -> None:
        """Set up this learner on the changed ranks, like a new one except for its state.
        Collective."""
        sent = self.bytes_sent
        self._agree()
        every, _ = self._checked
        self._is_made = False
        self._form_group()
        self._is_made = True
        self._watch_performance(every)
        self.bytes_sent = sent

    def state_replaced(self, cause: Cause) -> None:
        """Report the replacement of the learner's whole state to its parts.

        Collective on fault-tolerant ranks, unless `cause` is RECOVERED; otherwise local.
        """
        event = StateReplaced(cause, self.samples)
        for part in (self._ledger, self.skipped, self.recovery):
            part.state_replaced(event)

    @abstractmethod
    def fail(self, problem: str) -> NoReturn:
        """See `Learner.fail`."""

    @abstractmethod
    def meet(self) -> None:
        """See `Learner.meet`."""

    @property
    def states(self) -> dict[str, Any]:
        """The contents of a checkpoint besides the parameters, by name: dataclasses as described in
        `parallel_sgd.state`. Local."""
        return {"optimizer": self.local_step.state, "algorithm": self.state}

    @property
    def components(self) -> list[Component]:
        """All components of all `states`. Local."""
        return [part for state in self.states.values() for _, part in components(state)]

    def wait(self) -> None:
        """Wait for background work, so that all `states` are complete; training is not affected.
        Local."""
        for component in self.components:
            component.wait()

    @property
    def samples(self) -> int:
        """Samples seen by all ranks so far. Local."""
        return self.local_step.state.samples

    @samples.setter
    def samples(self, samples: int) -> None:
        self.local_step.state.samples = samples

    @property
    def last_samples(self) -> int:
        """Samples of all ranks in the latest step; 0 means that every rank has run out of data.
        Local."""
        return self._ledger.trained

    @last_samples.setter
    def last_samples(self, samples: int) -> None:
        self._ledger.trained = samples

    @property
    def serves(self) -> bool:
        """True if this rank has no data and takes no steps: `finish` serves until the workers have
        finished. Sources issue no minibatches to such a rank. Local."""
        return self.group.serves

    @property
    def tables(self) -> Mapping[str, Any]:
        """The tables that the algorithm keeps on servers (`Embedding`, `ArrayTable`), by name. A
        missing name is a UserError. Local."""
        return RemoteTables(getattr(self.state, "tables", {}))

    def report(self) -> dict[str, Any] | None:
        """Return the algorithm's statistics of this rank's training so far (of all ranks' training,
        after `finish`), in a form that JSON can hold; None if there are none. Local."""
        report, recovery = self.runner.report(), self.recovery.report()
        return (report or {}) | {"recovery": recovery} if recovery else report

    @property
    def is_fed(self) -> bool:
        """True while a source issues minibatches. Local."""
        return self._ledger.feed is not None

    @property
    def rate_is_per_sample(self) -> bool:
        """True if, at one rate, a minibatch twice as large takes a step twice as long. Local."""
        return getattr(self.local_step.optimizer, "lr_per_sample", None) is not None

    @property
    def distributed(self) -> bool:
        """True if this rank takes its part of each minibatch; False during the warm start, when
        every rank takes the whole minibatch. Local."""
        return self.samples >= self.algorithm.distributed_after

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks for training so far, as its algorithm
        counts. Local."""
        return self._sent_before + self.runner.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, sent: int) -> None:
        self._sent_before += sent - self.bytes_sent
