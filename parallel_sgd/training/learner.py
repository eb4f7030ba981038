"""The learner: parameters, an optimizer and an algorithm, run on a group of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self, TypeVar

from ..communication import InBackground, can_recover
from ..errors import SharedError, UserError
from ..trace import NO_TRACE
from ..validation import integer, kind_of, one_number
from ..warning import warn
from . import non_finite
from .consistency import FAIL, FINISH, MEET, SAME_GRADIENTS, STEP
from .feed import Feed
from .learner_setup import LearnerSetup
from .minibatch_ledger import MOST_SAMPLES

Result = TypeVar("Result")


class Learner(LearnerSetup):
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
        if not self.world.fault_tolerant:
            raise UserError("recover: the ranks must survive each other (run --survive)")
        self.recovery.recover()

    def surviving(self, function: Callable[[], Result]) -> Result:
        """Run a training function from the learner's current position; rerun the function after
        every rank failure during the call. Collective.

        Args:
            function: takes no arguments; gets its minibatches from a source. May use the ranks in
                any way, such as to evaluate.
        Returns:
            The function's result, once all remaining ranks have completed the function.
        """
        return self.recovery.run(function)

    def between_steps(self, function: Callable[[], Result]) -> Result:
        """Run a collective function without steps, such as an evaluation of your own; rerun the
        function after a rank failure during the call. Collective.

        Args:
            function: takes no arguments. Training may have rolled back before a rerun.
        Returns:
            The function's result, once all remaining ranks have completed the function.
        """
        return self.recovery.commit_after(function)

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
        self._ledger.add(samples, total)

    def discard_issued(self) -> None:
        """Discard the announced minibatches that no step has taken, and their source. Later steps
        have no source, or a new source. Local."""
        self._ledger.clear()

    def feed(self) -> Feed:
        """Open a `with` block for one pass of a source over its minibatches. The feed gives the
        start of the next minibatch, and whether the ranks split this minibatch, and announces each
        minibatch. Local.

        From then on `step` takes the issued minibatches, and is refused without any. At the end of
        a complete pass, minibatches without a step stay queued. If the block is left early, such
        minibatches are discarded.
        """
        return Feed(self._ledger, self.algorithm, self.fail, self.recovery)

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
        self.require_open()
        if name not in self.gradient:
            raise UserError(f"name={name!r} must be a parameter: {', '.join(self.gradient)}")
        if self._ledger.next_is_discarded:
            return
        self.runner.ready(name)

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
        if loss is not None:
            try:
                self.skipped.check_loss(float(one_number("loss", loss)))
            except UserError as error:
                self.fail(str(error))
        ledger = self._ledger
        if not self._take_discarded(samples):
            before = ledger.steps
            if self.recovery.step(self._timed_step, samples):
                return ledger.trained
            if ledger.steps == before:  # the step failed before its minibatch was taken
                self._take_discarded(samples)
        self._discard_minibatch()
        self.last_samples = 0
        return 0

    def _take_discarded(self, samples: int) -> bool:
        try:
            return self._ledger.take_discarded(samples)
        except UserError as error:
            self.fail(str(error))

    def _discard_minibatch(self) -> None:
        """Discard this rank's computed results: the minibatch will be issued again. Local."""
        self.skipped.problem(None)

    def _timed_step(self, samples: int) -> int:
        if self._background_tasks.work or self._closed:
            self._check_background_tasks()
        if self._shared.is_shown:
            self.require_own_model("step")
        trace, stats = self.world.trace, self._performance
        if stats is None and trace is NO_TRACE:
            if self._computes_since is not None:
                self._computes_since = None
            return self._step(samples)
        if self._computes_since is not None:
            trace.record("compute", self._computes_since, time.perf_counter())
        if stats:
            stats.begin_step()
        with trace.span("step"):
            total = self._step(samples)
        if stats and (line := stats.stepped(samples, total, lambda: self.bytes_sent)):
            print(line, flush=True)
        self._computes_since = time.perf_counter()
        return total

    def _step(self, samples: int, *, skip: bool = False) -> int:
        """Take a step; with `skip`, on all ranks, only the clock advances."""
        if self.serves:
            raise UserError(
                f"rank {self.world.rank} is a server and takes no step: call learner.finish() "
                "there, which serves (sources give it no minibatches)"
            )
        comm, ledger = self.comm, self._ledger
        self.consistency.begin(STEP, comm)
        try:
            try:
                samples = integer("samples", samples, 0, MOST_SAMPLES)
                total = ledger.take(samples)
            except UserError as error:
                self.fail(str(error))
            if samples == 0:  # remove the result of the last exchange
                self.gradient.flat.fill(0)
            if skip:
                trained = self.runner.skip(samples, total)
            elif self.skipped.skips:
                trained = non_finite.train(self.runner, samples, total)
            else:
                trained = self.runner.train(samples, total)
            ledger.trained = trained
            if total is not None and trained > total:
                ledger.catch_up(trained - total)
        finally:
            comm.consistency = None
            ledger.end_step()
        if self.consistency.mark and self.consistency.same_gradients() and comm.rank == 0:
            try:
                warn(SAME_GRADIENTS)
            except UserError as error:
                self.fail(str(error))
        return trained

    def fail(self, problem: str) -> NoReturn:
        """End training because of a problem on this rank alone (bad data, say), in place of a
        `step`.

        Args:
            problem: one line.
        Raises:
            UserError: on this rank now, and on every rank at its next synchronization: in `step`,
                `meet` or `finish`.
        """
        self.require_open()
        self.discard_issued()
        with self.consistency.during(FAIL, self.comm):
            self.runner.fail(problem)

    def meet(self) -> None:
        """Synchronize all ranks, and check their progress for equality. Call this before
        collectives of your own on `comm`, such as an evaluation. Collective.

        Raises:
            UserError: on all ranks, if any rank has called `fail`, or if the ranks disagree on the
                minibatches so far, the samples trained on, or the model.
        """
        self.require_open()
        self.recovery.collective(self.meet_once)

    def meet_once(self) -> None:
        """Synchronize as `meet` does, but without a retry after a rank failure. Collective.

        Raises:
            RanksLost: a rank has failed (with fault-tolerant ranks).
        """
        with self.consistency.during(MEET, self.comm):
            self.runner.meet()

    @contextmanager
    def outside_training(self, name: str) -> Iterator[None]:
        """Record a `with` block under this name in the trace, not as computing: for work between
        two steps, such as an evaluation. Local."""
        with self.world.trace.span(name):
            yield
        self._computes_since = time.perf_counter()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Make `parameters` the common model for a `with` block, to evaluate that model together.
        Collective at the start of the block; not for ranks that only serve.

        Raises:
            UserError: on all ranks, as `meet`.
        """
        self.meet()
        with self.outside_training("evaluate"), self.shared_model():
            yield

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Make `parameters` the common model for a `with` block, to evaluate that model.

        While ranks train alone, the common model is the result of the latest synchronization. The
        block must not take steps or save checkpoints. Training afterwards continues as if there had
        been no block. Local. Copies the model if the common model differs from `parameters`.
        """
        self.require_open()
        with self._shared.shown(self.parameters.flat, self.runner.common_model()):
            yield

    def finish(self) -> None:
        """Complete all pending work, so that all ranks hold the final model. Collective.

        A rank with only a server's role serves here, until all workers have finished.

        Raises:
            UserError: on all ranks, as `meet` does; or if a rank has taken no step with samples
                issued before its source ended, and some ranks have (or cannot be asked).
        """
        self.require_own_model("finish")
        # bounded: waits for work of this rank, whose own waits are bounded
        self._background_tasks.wait()  # background tasks may need the servers, and these end below
        self._check_background_tasks()
        try:
            self._ledger.require_none_skipped()
        except UserError as error:
            self.fail(str(error))
        with self.world.trace.span("serve" if self.serves else "finish"):
            self.recovery.finish(self._complete)
        self._stop_statistics()

    def _complete(self) -> None:
        with self.consistency.during(FINISH, self.comm):
            non_finite.finish(self.runner)

    def add_background_task(self, work: InBackground[Any]) -> None:
        """Register work that runs during training, such as writing a checkpoint. `step` and
        `finish` report a failure of this work to all ranks; `close` waits for its end. Local."""
        self._background_tasks.add(work)

    def _check_background_tasks(self) -> None:
        """Report a failed background task to all ranks, in place of a step."""
        self.require_open()
        self._background_tasks.check()

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
        if not self._closed:
            self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        self._closed = True
        try:
            self._background_tasks.end(failed=failed)
        finally:
            try:
                self.runner.close(failed=failed)
            except Exception as error:
                if not can_recover(self.world, error):
                    raise
                self.recovery.give_up()
            self._stop_statistics()

    def _stop_statistics(self) -> None:
        if self._performance:
            if said := self._performance.missed():
                print(said, flush=True)
            self.world.trace, self._performance = self._performance.passed_on, None

    def model_arrays(self) -> dict[str, Any]:
        """Return the arrays for a model file, by name: views of the parameters. Local."""
        return {name: self.parameters[name] for name in self.parameters}

    def require_open(self) -> None:
        """Refuse a call on a closed learner. Local."""
        if self._closed:
            raise UserError("this learner is closed: after close() it cannot train any more")

    def require_own_model(self, name: str) -> None:
        """See `SharedModel.require_own`. Local."""
        self._shared.require_own(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, frames: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, SharedError) and not self._closed:
            self._close(failed=True)
        self._closed = True


def require_learner(learner: Any) -> Learner:
    """Return `learner` if this is a `Learner`. Local.

    Raises:
        UserError: `learner` is something else.
    """
    if not isinstance(learner, Learner):
        raise UserError(f"learner must be an open Learner: it is {kind_of(learner)}")
    return learner
