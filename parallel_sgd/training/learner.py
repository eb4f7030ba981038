"""The learner: parameters, an optimizer and an algorithm, run on a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from ..algorithms import Algorithm, Work
from ..algorithms.skipped import Skipped
from ..communication import Communicator, Group
from ..communication.liveness.rank_status import Status, report_status
from ..errors import SharedError, UserError
from ..kernels import array_module
from ..local_step import UpdateRule
from ..parameter_server import RemoteTables
from ..parameters import Parameters
from ..state import Cause, StateReplaced
from ..validation import kind_of
from . import non_finite
from .arguments import AgreedArguments, Options, require_communicator
from .background_tasks import BackgroundTasks
from .consistency import EVERY, FAIL, FINISH, ConsistencyCheck
from .feed import Feed
from .fixed_attributes import AS_MADE, FixedAttributes
from .minibatch_ledger import MinibatchLedger
from .model_access import ModelAccess
from .model_adapter import ModelAdapter
from .non_finite import MOST_SKIPPED, NotFinite
from .preparing import prepare_kernels
from .recovery.base import NoRecovery, Recovery, begin_with_remaining
from .recovery.choice import recovery_of
from .recovery.rollback import COMMIT_EVERY
from .runner import AlgorithmRunner
from .shares import RankShares
from .step import TrainingStep
from .step_timer import StepTimer

Result = TypeVar("Result")


class Learner(FixedAttributes):
    """Trains the ranks' common model with the gradients computed by each rank.

    Args:
        parameters: the model; on return rank 0's values on all ranks. The arrays may be views that
            the model goes on using: every update is in place.
        optimizer: the local update rule.
        algorithm: how the ranks train together.
        comm: the ranks.
        sync_perf_stats: the first training rank prints a line on the cost of exchanges after this
            many exchanges of all ranks: see `SyncPerformance`. 0: never.
        minibatch_size: samples of all ranks in each minibatch, if known. An impossible size is then
            refused here instead of in the first step.
        commit_every: with fault-tolerant ranks (`parallel-sgd run --survive`), take a snapshot of
            the state every this many steps. Training rolls back to a snapshot after a rank failure.
        not_finite: the policy for an infinite or NaN gradient (or loss given to `step`) on any
            rank. "stop": training ends on all ranks. "skip": all ranks skip the minibatch; while
            training alone, ranks skip the whole block; a worker of parameter servers skips its
            push. The clock advances and all other state stays as before: see `report`.
        most_skipped: consecutive skips allowed; one more ends training.
        compare_every: steps between two comparisons of the ranks' models and momenta; 0: never.
            Each comparison costs one pass over memory.
    Raises:
        UserError: on all ranks, if an argument is invalid on any rank, or if the ranks disagree on
            layout, dtype, optimizer, algorithm, any option, or the library's version.

    Attributes:
        gradient: of the parameters' layout. Fill it with the gradient *summed* over this rank's
            samples before each `step`.
        world: all ranks.
        comm: the ranks with this rank's role: all ranks, or with parameter servers the workers or
            the servers.
        local_step: the optimizer, bound to the parameters; its state holds the clock.
        group: the ranks, each with its role.
        runner: the algorithm, bound to the model.
        state: the algorithm's state.
        skipped: minibatches skipped because of infinite or NaN numbers.
        consistency: the facts compared between ranks at every synchronization.
        recovery: continues training after rank failures; `NoRecovery` without fault-tolerant ranks.
        ledger: the minibatches that a source has issued and no step has taken.
        adapter: the model behind the parameters.
        access, agreed, background_tasks, timer: see their classes.

    Collective. Memory: the gradient, plus the buffers of optimizer and algorithm. An MPI has room
    for some thousand communicators, so a program with many learners must close each learner: by
    `close`, or by a `with` block.

    >>> import numpy as np, parallel_sgd as psgd
    >>> comm = psgd.Communicator.single()
    >>> model = psgd.models.MLP([64, 16, 10], seed=0)
    >>> learner = psgd.Learner(
    ...     model.parameters, psgd.MomentumSGD(lr=0.1), psgd.DataParallelSGD(gradient_bits=1), comm
    ... )
    >>> x, y = np.ones((8, 64), np.float32), np.arange(8)
    >>> loss = model.gradient(x, y, out=learner.gradient)
    >>> learner.step(samples=len(x))
    8
    """

    fixed = dict.fromkeys(
        (
            *("optimizer", "algorithm", "comm", "world", "local_step"),
            *("sync_perf_stats", "minibatch_size", "commit_every"),
            *("not_finite", "most_skipped", "compare_every"),
        ),
        AS_MADE,
    ) | {
        "gradient": "fill it in place, learner.gradient.flat[...] = gradient.flat",
        "parameters": "change them in place, learner.parameters.flat[...] = parameters.flat",
        "lr": "the optimizer has the learning rate: give the optimizer a schedule "
        "(parallel_sgd.schedules), or set group['lr'] of a PyTorch optimizer's param_groups",
    }

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
        options = Options(
            sync_perf_stats, minibatch_size, commit_every, not_finite, most_skipped, compare_every
        )
        self._start(ModelAdapter(parameters, optimizer), algorithm, comm, options)

    def _start(
        self,
        adapter: ModelAdapter,
        algorithm: Algorithm[Any],
        comm: Communicator,
        options: Options,
    ) -> None:
        """Set up the learner of a model on the ranks. Collective."""
        require_communicator(comm)
        comm.require_whole()
        self.adapter, self.algorithm, self.world = adapter, algorithm, comm
        self._number, self.started = comm.learners, comm.generation
        self.agreed = AgreedArguments(options, self._number)
        self.access, self.skipped = ModelAccess(), Skipped()
        self.timer = StepTimer(comm, lambda: self.bytes_sent)
        self.shares = RankShares(self)
        self.recovery: Recovery = NoRecovery()
        self.stripe_sizes: Sequence[Mapping[str, int]] = []  # of all fault-tolerant ranks
        self._group: Group | None = None
        self._training_step = TrainingStep(self)
        self._sent_before = 0  # by the learner of the loaded checkpoint
        try:
            begin_with_remaining(comm, self._begin)
        except BaseException:  # so that another learner can use model and optimizer
            adapter.detach()
            raise
        comm.learners += 1
        self._is_made = True

    def _begin(self) -> None:
        """Check the arguments and set up all parts; again on the remaining ranks if a rank fails
        meanwhile. Collective."""
        comm, algorithm, adapter = self.world, self.algorithm, self.adapter
        adapter.detach()
        self.agreed.renew(comm, adapter, algorithm)
        self.parameters = adapter.parameters
        self.gradient = self.parameters.like()
        self.local_step = adapter.bind()
        x = self.parameters.flat
        if array_module(x) is np:
            steps = self.local_step.first_calls(quantized=algorithm.quantizes_in_steps)
            prepare_kernels(comm, algorithm.first_calls(x[:0].copy()) + steps)
        self.ledger = MinibatchLedger(algorithm, self.local_step)
        self.background_tasks = BackgroundTasks(self.fail)
        self._form_group()
        every = self.agreed.options.commit_every
        self.recovery = recovery_of(self, self._reconfigure, every, self.recovery)
        self.recovery.begin()
        report_status(Status.TRAINS)

    def _form_group(self) -> None:
        """Give every rank its role, and make the state before the first minibatch. Collective."""
        x, step, options = self.parameters, self.local_step, self.agreed.options
        algorithm, choices = self.algorithm, self.agreed.choices
        self.skipped.skips, self.skipped.most = options.skips, options.most_skipped
        self.group = self._group = group = algorithm.roles.form(self.world, self._group)
        self.comm = group.own  # the algorithm's duplicates share its trace
        self.timer.watch(options.sync_perf_stats, group, asynchronous=algorithm.asynchronous)
        self.world.broadcast(x.flat)
        size = options.minibatch_size
        work = Work(x, self.gradient, step, self.comm, group, size, self.skipped, choices)
        self.runner = AlgorithmRunner(algorithm, work)
        self.state = self.runner.state
        parts = self.runner, step, self.ledger, self.adapter.gradient_mark
        before = getattr(self, "consistency", None)
        self.consistency = ConsistencyCheck(self._number, *parts, options.compare_every, before)
        self.adapter.attach(self)

    def _reconfigure(self) -> None:
        """Set up this learner on the changed ranks, like a new one except for its state.
        Collective."""
        sent = self.bytes_sent
        self.agreed.renew(self.world, self.adapter, self.algorithm)
        self._is_made = False
        self._form_group()
        self._is_made = True
        self.bytes_sent = sent

    def step(self, samples: int, loss: float | None = None) -> int:
        """Train on one minibatch, with its gradient in `gradient`.

        Args:
            samples: of this rank in the minibatch; 0 if this rank has none: `gradient` is then
                ignored.
            loss: of this rank's minibatch, optional. An infinite or NaN loss counts as such a
                gradient.
        Returns:
            The samples of all ranks in this minibatch; 0 if a rank has failed and training has
            rolled back, so that the minibatch will be issued again.
        Raises:
            UserError: on all ranks, if any rank's gradient is infinite or NaN (nothing has
                changed), or, for ranks training alone for a while, if a model is so at the next
                synchronization (unless `not_finite` is "skip"); if a checkpoint could not be
                written in the background; if a rank has omitted a step, or taken a step without a
                minibatch or with a sample count different from the source's; if the ranks' copies
                of the common model differ.

        Collective: every rank takes every step. The algorithm decides on the communication.
        """
        return self._training_step.run(samples, loss)

    def ready(self, name: str) -> None:
        """Report the gradient of one parameter as complete, before `step`, during the backward
        pass. An algorithm with ``overlap=True`` starts to exchange this gradient.

        Args:
            name: of the parameter; buckets are exchanged last parameter first. From here until
                `step` returns, this parameter's part of `gradient` must not be touched.
        Raises:
            UserError: there is no such parameter.

        Local. After this call the rank must take the step with samples. The call is optional for
        each parameter.
        """
        self.access.require_open()
        if name not in self.gradient:
            raise UserError(f"name={name!r} must be a parameter: {', '.join(self.gradient)}")
        if self.ledger.next_is_discarded:
            return
        self.runner.ready(name)

    def announce(self, samples: int, total: int) -> None:
        """Announce the sample counts of a coming `step`, so that the ranks need not exchange
        counts.

        Either all ranks announce every minibatch, in order, or no rank announces any. A step takes
        the next minibatch, or the next few minibatches that together have the step's samples:
        minibatches may be fetched ahead, also in another thread, and gradients may be accumulated.
        Minibatches that all ranks skip alike are passed over. Sources use `feed` instead.

        Args:
            samples: of this rank in the minibatch.
            total: of all ranks in the minibatch; the same on all ranks.

        Local.
        """
        self.ledger.add(samples, total)

    def feed(self) -> Feed:
        """Open a `with` block for one pass of a source over its minibatches. The feed gives the
        start of the next minibatch, and whether the ranks split this minibatch, and announces each
        minibatch. Local.

        From then on `step` takes the issued minibatches, and is refused without any. At the end of
        a complete pass, minibatches without a step stay queued. If the block is left early, such
        minibatches are discarded.
        """
        return Feed(self.ledger, self.algorithm, self.shares, self.fail, self.recovery)

    def discard_issued(self) -> None:
        """Discard the announced minibatches that no step has taken, and their source. Later steps
        have no source, or a new source. Local."""
        self.ledger.clear()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Make `parameters` the common model for a `with` block, to evaluate that model together.
        Collective at the start of the block; not for ranks that only serve.

        Raises:
            UserError: on all ranks, as `meet`.
        """
        self.meet()
        with self.timer.outside_training("evaluate"), self.shared_model():
            yield

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Make `parameters` the common model for a `with` block, to evaluate that model.

        While ranks train alone, the common model is the result of the latest synchronization. The
        block must not take steps or save checkpoints. Training afterwards continues as if there had
        been no block. Local. Copies the model if the common model differs from `parameters`.
        """
        self.access.require_open()
        with self.access.shown(self.parameters.flat, self.runner.common_model()):
            yield

    def finish(self) -> None:
        """Complete all pending work, so that all ranks hold the final model. Collective.

        A rank with only a server's role serves here, until all workers have finished.

        Raises:
            UserError: on all ranks, as `meet` does; or if a rank has taken no step with samples
                issued before its source ended, and some ranks have (or cannot be asked).
        """
        self.access.require_own("finish")
        # bounded: waits for work of this rank, whose own waits are bounded
        self.background_tasks.wait()  # background tasks may need the servers, and these end below
        self.access.require_open()
        self.background_tasks.check()
        try:
            self.ledger.require_none_skipped()
        except UserError as error:
            self.fail(str(error))
        with self.world.trace.span("serve" if self.serves else "finish"):
            self.recovery.finish(self._complete)
        self.timer.stop()

    def _complete(self) -> None:
        with self.consistency.during(FINISH, self.comm):
            non_finite.finish(self.runner)
        if not self.serves:
            self.adapter.finish()

    def close(self) -> None:
        """Release the learner's communicators, threads and buffers.

        Pending work is completed first, but nothing that `finish` does is done. Afterwards the
        learner cannot train; `parameters`, `samples`, `bytes_sent` and `report` keep their values.
        A second call does nothing. A `with` block closes the learner at its end, except after an
        error that some ranks may not have raised: closing would wait for those ranks.

        Raises:
            UserError: on all ranks, if a background task has failed.

        Collective, including ranks that serve.
        """
        if not self.access.is_closed:
            self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        self.access.is_closed = True
        try:
            self.background_tasks.end(failed=failed)
        finally:
            try:
                self.recovery.close(lambda: self.runner.close(failed=failed))
            finally:
                self.timer.stop()
                self.adapter.detach()

    def model_arrays(self) -> dict[str, Any]:
        """Return the arrays for a model file, by name: views of the parameters. Local."""
        return self.adapter.arrays()

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
        return self.ledger.trained

    @last_samples.setter
    def last_samples(self, samples: int) -> None:
        self.ledger.trained = samples

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks for training so far, as its algorithm
        counts. Local."""
        return self._sent_before + self.runner.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, sent: int) -> None:
        self._sent_before += sent - self.bytes_sent

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
        own = self.runner.report() or {}
        return own | self.recovery.report() | self.shares.report() or None

    @property
    def common_progress(self) -> int:
        """A count of work completed by all ranks together: see `data.view.Agreement`. Local."""
        return self.recovery.common_progress

    @property
    def joined_generation(self) -> int:
        """The generation in which a rank that trains has joined last; 0 if none has. Local."""
        return self.agreed.generation if self.algorithm.roles.together else 0  # else it serves

    @property
    def distributed(self) -> bool:
        """True if this rank takes its part of each minibatch; False during the warm start, when
        every rank takes the whole minibatch. Local."""
        return self.samples >= self.algorithm.distributed_after

    @property
    def states(self) -> dict[str, Any]:
        """The contents of a checkpoint besides the parameters, by name: dataclasses as described in
        `parallel_sgd.state`. Local."""
        own = {"optimizer": self.local_step.state, "algorithm": self.state}
        return own | self.adapter.states

    def state_replaced(self, cause: Cause) -> None:
        """Report the replacement of the learner's whole state to its parts.

        Collective on fault-tolerant ranks, unless `cause` is RECOVERED; otherwise local.
        """
        event = StateReplaced(cause, self.samples)
        for part in (self.ledger, self.shares, self.skipped, self.recovery, self.adapter):
            part.state_replaced(event)

    def surviving(self, function: Callable[[], Result]) -> Result:
        """Run a training function from the learner's current position; rerun the function after
        every rank failure during the call. Collective.

        Args:
            function: takes no arguments. Gets its minibatches from a source, or computes them from
                `samples`, which a failure sets back. May use the ranks in any way, such as to
                evaluate.
        Returns:
            The function's result, once all remaining ranks have completed the function. No later
            failure leads back into it.
        """
        return self.recovery.complete(function)

    def between_steps(self, function: Callable[[], Result]) -> Result | None:
        """Run a collective function without steps, such as an evaluation of your own; rerun the
        function after a rank failure during the call. Collective.

        Args:
            function: takes no arguments.
        Returns:
            The function's result, once all remaining ranks have completed the function. None if
            training has rolled back to before the call, as `step` returns 0: some ranks may not
            have come to the call. Go on with the loop, which calls again at the same place. Within
            `surviving`, its function is rerun instead. With parameter servers nothing is rolled
            back, and every call has a result.
        """
        return self.recovery.commit_after(function)

    def recover(self) -> None:
        """Continue training without the failed ranks. Call this on all remaining ranks after a
        collective of this learner or of a communicator has raised `RanksLost`, in place of the
        failed call.

        The model and all state are those of an earlier time, to which `samples` has been set back;
        sources issue the samples after that point again. (With parameter servers nothing is set
        back.) The learner's own `step` and `finish` recover without this call. Collective.

        Raises:
            UserError: the ranks are not fault-tolerant.
        """
        self.recovery.recover()

    def repeated(self, function: Callable[[], Result]) -> Result:
        """Run a collective function, and rerun it after every rank failure during the call. A rank
        may have completed it when others rerun it: for what every rank does again after a rollback.
        Sources meet so. Collective."""
        return self.recovery.run(function)

    def gathered(self, own: Result) -> list[Result]:
        """Gather one item from every remaining rank, in a session. Failed ranks are not waited for.
        Collective.

        Args:
            own: this rank's item, as for `Communicator.allgather_object`.
        """

        def gathered() -> list[Result]:
            self.meet()
            return self.comm.allgather_object(own)

        return self.recovery.collective(gathered)

    def meet(self) -> None:
        """Synchronize all ranks, and check their progress for equality. Call this before
        collectives of your own on `comm`, such as an evaluation. Collective.

        Raises:
            UserError: on all ranks, if any rank has called `fail`, or if the ranks disagree on the
                minibatches so far, the samples trained on, or the model.
        """
        self.access.require_open()
        self.recovery.collective(lambda: self.consistency.meet(self.comm))

    def fail(self, problem: str) -> NoReturn:
        """End training because of a problem on this rank alone (bad data, say), in place of a
        `step`.

        Args:
            problem: one line.
        Raises:
            UserError: on this rank now, and on every rank at its next synchronization: in `step`,
                `meet` or `finish`.
        """
        self.access.require_open()
        self.discard_issued()
        with self.consistency.during(FAIL, self.comm):
            self.runner.fail(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, SharedError) and not self.access.is_closed:
            self._close(failed=True)
        self.access.is_closed = True


def require_learner(learner: Any) -> Learner:
    """Return `learner` if this is a `Learner`. Local.

    Raises:
        UserError: `learner` is something else.
    """
    if not isinstance(learner, Learner):
        raise UserError(f"learner must be an open Learner: it is {kind_of(learner)}")
    return learner
