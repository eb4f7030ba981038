"""The learner: parameters, an optimizer and an algorithm, at work on a group of ranks."""

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
from . import non_finite as leaving_out
from .consistency import FAIL, FINISH, MEET, SAME_GRADIENTS, STEP
from .feed import Feed
from .learner_setup import LearnerSetup
from .minibatch_ledger import MOST_SAMPLES

Result = TypeVar("Result")


class Learner(LearnerSetup):
    """Trains the ranks' common model with the gradients that each of them computes.

    Args:
        parameters: the model; on return rank 0's values on all ranks. They may be views that the
            model goes on using: every update is in place.
        optimizer: the local update rule.
        algorithm: how the ranks train together.
        comm: the ranks.
        sync_perf_stats: after every so many exchanges of all ranks the first rank that trains
            prints a line on their cost: see `SyncPerformance`. 0: never.
        minibatch_size: samples of all ranks in each minibatch, where that is known: what cannot be
            trained on is then refused here, and else by the first step.
        commit_every: where ranks survive each other (`parallel-sgd run --survive`), keep a copy of
            the state after so many steps, to which training goes back when a rank has died.
        not_finite: what becomes of a gradient (or a loss that `step` is given) that is not finite
            on any rank. "stop": training ends, on all. "skip": all ranks leave the minibatch out;
            where they go by themselves for a while, the whole block; a worker of parameter servers
            its push. The clock goes on, and all else is what it was before: see `report`.
        most_skipped: so many times in a row; then training ends.
        compare_every: steps from one comparison of the ranks' models and momenta to the next; 0:
            never. A pass over memory each.
    Raises:
        UserError: on all ranks, if an argument is not what it must be on any of them, or if they
            disagree on layout, dtype, optimizer, algorithm, any option, or the library's version.

    Attributes:
        gradient: of the parameters' layout; fill it with the gradient *summed* over this rank's
            samples before each `step`.
        world: all ranks.
        comm: the ranks that do what this one does: all, or where some only serve, the workers or
            the servers.
        local_step: the optimizer at work; its state holds the clock.
        group: the ranks, each with its role.
        at_work: the algorithm.
        state: the algorithm's.
        left_out: what was left out of training, since its numbers were not finite.
        in_common: what the ranks compare where they wait for each other.

    Collective. Memory: the gradient, and what optimizer and algorithm need. A program that makes
    many learners closes each, since an MPI has room for some thousand communicators: `close`, or a
    `with` block.

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
        """Go on without the ranks that have died: in place of the call of this learner's, or of a
        communicator's, that has raised a `RanksLost`, on all ranks that are left.

        The model and all state are those of an earlier time, to which `samples` has gone back;
        sources deal out what comes after it. A learner's own `step` and `finish` do this by
        themselves. Collective.

        Raises:
            UserError: the ranks do not survive each other.
        """
        if not self.world.fault_tolerant:
            raise UserError("recover: the ranks must survive each other (run --survive)")
        self.recovery.recover()

    def surviving(self, function: Callable[[], Result]) -> Result:
        """Call a function that trains from wherever the learner stands, and again wherever a rank
        has died in it. Collective.

        Args:
            function: called with nothing; takes its minibatches from a source. It may do anything
                with the ranks, such as evaluate.
        Returns:
            What it returned, when all ranks that are left had come to its end.
        """
        return self.recovery.run(function)

    def between_steps(self, function: Callable[[], Result]) -> Result:
        """Call a function of all ranks that takes no step, such as an evaluation of your own; again
        where a rank has died in it. Collective.

        Args:
            function: called with nothing. Training may have gone back when it is called again.
        Returns:
            What it returned, when all ranks that are left had come to its end.
        """
        return self.recovery.commit_after(function)

    def gathered(self, own: Result) -> list[Result]:
        """What each rank tells, in a session; a rank that has failed is not waited for. Collective.

        Args:
            own: as of `Communicator.allgather_object`.
        """

        def gathered() -> list[Result]:
            self.meet()
            return self.comm.allgather_object(own)

        return self.recovery.collective(gathered)

    def announce(self, samples: int, total: int) -> None:
        """Announce the counts of a coming `step`, so that the ranks need not ask each other.

        All ranks announce every minibatch, in their order, or none does. A step takes the next one,
        or the next ones that together have its samples, so that minibatches may be fetched ahead,
        also in another thread, and gradients be added up. What all ranks leave out alike is passed
        over. For sources there is `feed`.

        Args:
            samples: of this rank in the minibatch.
            total: of all ranks in it; the same on all.

        Local.
        """
        self._announced.add(samples, total)

    def discard_issued(self) -> None:
        """Forget what is announced and no step has taken, and the source that has given it: what
        follows are steps without a source, or with another one. Local."""
        self._announced.clear()

    def feed(self) -> Feed:
        """For sources: a `with` block around one pass over their minibatches, which tells where the
        next one begins, whether it is split, and announces it. Local.

        From then on `step` takes what was given, and is refused without. What no step has taken is
        kept where the pass has come to its end, and forgotten where it was left before.
        """
        return Feed(self._announced, self.algorithm, self.fail, self.recovery)

    def ready(self, name: str) -> None:
        """Tell that the gradient of one parameter is complete, before `step`, while others are
        still being computed: an algorithm with ``overlap=True`` begins to exchange it.

        Args:
            name: of the parameter; last ones first is how buckets are exchanged. From here on its
                part of `gradient` may not be touched until `step` returns.
        Raises:
            UserError: there is no such parameter.

        Local; whoever calls it takes the step with samples. Parameters need not be told of.
        """
        self.require_open()
        if name not in self.gradient:
            raise UserError(f"name={name!r} must be a parameter: {', '.join(self.gradient)}")
        if self._announced.next_is_discarded:
            return
        self.runner.ready(name)

    def step(self, samples: int, loss: float | None = None) -> int:
        """Train on the minibatch whose gradient is in `gradient`.

        Args:
            samples: of this rank in it; 0 where it has none, and then `gradient` is not looked at.
            loss: of this rank in it, if you like: where it is not finite, that counts as a gradient
                that is not.
        Returns:
            The samples of all ranks in this minibatch; 0 where a rank has died, and the others have
            gone back, so that the minibatch is dealt out anew.
        Raises:
            UserError: on all ranks, if any rank's gradient is not finite (nothing has changed), or,
                where the ranks train alone for a while, its model at the next synchronization
                (unless `not_finite` says that it is left out); if
                a checkpoint could not be written in the background; if a rank has left out a step,
                or taken one without a minibatch or with another number of samples than its source
                gave; if models that must be equal are not.

        Collective: every rank takes every step. What is communicated is the algorithm's affair.
        """
        if loss is not None:
            try:
                self.skipped.check_loss(float(one_number("loss", loss)))
            except UserError as error:
                self.fail(str(error))
        ledger = self._announced
        if not self._take_discarded(samples):
            before = ledger.steps
            if self.recovery.step(self._timed_step, samples):
                return ledger.trained
            if ledger.steps == before:  # the step had not come so far
                self._take_discarded(samples)
        self._forget_minibatch()
        self.last_samples = 0
        return 0

    def _take_discarded(self, samples: int) -> bool:
        try:
            return self._announced.take_discarded(samples)
        except UserError as error:
            self.fail(str(error))

    def _forget_minibatch(self) -> None:
        """What the program has computed is of a minibatch that is dealt out anew. Local."""
        self.skipped.problem(None)

    def _timed_step(self, samples: int) -> int:
        if self._beside.work or self._closed:
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
        """
        Args:
            skip: whether the minibatch is left out by all ranks: only the clock goes on.
        """
        if self.serves:
            raise UserError(
                f"rank {self.world.rank} is a server and takes no step: call learner.finish() "
                "there, which serves (sources give it no minibatches)"
            )
        comm, announced = self.comm, self._announced
        self.consistency.begin(STEP, comm)
        try:
            try:
                samples = integer("samples", samples, 0, MOST_SAMPLES)
                total = announced.take(samples)
            except UserError as error:
                self.fail(str(error))
            if samples == 0:  # whatever is left there from the last exchange
                self.gradient.flat.fill(0)
            if skip:
                trained = self.runner.skip(samples, total)
            elif self.skipped.skips:
                trained = leaving_out.train(self.runner, samples, total)
            else:
                trained = self.runner.train(samples, total)
            announced.trained = trained
            if total is not None and trained > total:
                announced.catch_up(trained - total)
        finally:
            comm.consistency = None
            announced.end_step()
        if self.consistency.mark and self.consistency.same_gradients() and comm.rank == 0:
            try:
                warn(SAME_GRADIENTS)
            except UserError as error:
                self.fail(str(error))
        return trained

    def fail(self, problem: str) -> NoReturn:
        """End training for a problem of this rank alone (bad data, say), in place of a `step`.

        Args:
            problem: one line.
        Raises:
            UserError: here, and on all ranks where they next wait for each other: in `step`, `meet`
                or `finish`.
        """
        self.require_open()
        self.discard_issued()
        with self.consistency.during(FAIL, self.comm):
            self.runner.fail(problem)

    def meet(self) -> None:
        """Find out whether all ranks have come so far: before collectives of your own on `comm`,
        such as an evaluation. Collective.

        Raises:
            UserError: on all ranks, if any of them has called `fail`, or what all must have in
                common differs: the minibatches so far, the samples trained on, the model.
        """
        self.require_open()
        self.recovery.collective(self.meet_once)

    def meet_once(self) -> None:
        """As `meet`; a rank that dies meanwhile is told of. Collective.

        Raises:
            RanksLost: where ranks survive each other.
        """
        with self.consistency.during(MEET, self.comm):
            self.runner.meet()

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """For a `with` block of something else than training, between two steps, such as an
        evaluation: a trace shows it by this name, and not as computing. Local."""
        with self.world.trace.span(name):
            yield
        self._computes_since = time.perf_counter()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """For a `with` block `parameters` are the model that all ranks have in common, to evaluate
        it together. Collective, as the block begins; not for ranks that only serve.

        Raises:
            UserError: on all ranks, as `meet`.
        """
        self.meet()
        with self.aside("evaluate"), self.shared_model():
            yield

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """For a while `parameters` are the model that all ranks have in common, to evaluate it.

        Where ranks train alone for a while, that is the model of the latest synchronization. A
        `with` block, in which there are no steps and no checkpoints; training goes on afterwards as
        if it had not been there. Local. Copies the model where it differs from `parameters`.
        """
        self.require_open()
        with self._shared.shown(self.parameters.flat, self.runner.common_model()):
            yield

    def finish(self) -> None:
        """Complete what is under way, so that all ranks hold the final model. Collective.

        On a rank that only serves it serves, until all others have finished.

        Raises:
            UserError: on all ranks, as `meet` does, or if a rank has taken no step with samples
                that a source gave before it ended, and others have (or cannot be asked).
        """
        self.require_own_model("finish")
        self._beside.wait()  # it may need servers, which end with this
        self._check_background_tasks()
        try:
            self._announced.require_none_skipped()
        except UserError as error:
            self.fail(str(error))
        with self.world.trace.span("serve" if self.serves else "finish"):
            self.recovery.finish(self._complete)
        self._stop_statistics()

    def _complete(self) -> None:
        with self.consistency.during(FINISH, self.comm):
            leaving_out.finish(self.runner)

    def beside(self, work: InBackground[Any]) -> None:
        """Hear of what goes on beside training, such as a checkpoint that is being written: of its
        failure `step` and `finish` tell all ranks, and `close` waits for it. Local."""
        self._beside.add(work)

    def _check_background_tasks(self) -> None:
        """Tell all ranks of what has failed beside training, in place of a step."""
        self.require_open()
        self._beside.look()

    def close(self) -> None:
        """Give back what the learner has taken beside memory: communicators, threads; and buffers.

        What is under way comes to its end first, but nothing that `finish` does is done. Then the
        learner trains no more; `parameters`, `samples`, `bytes_sent` and `report` stay as they are.
        To close it again does nothing. At the end of a `with` block it is closed, unless by an
        error that other ranks may not have: they would be waited for.

        Raises:
            UserError: on all ranks, if what went on beside training has failed.

        Collective, on ranks that serve too.
        """
        if not self._closed:
            self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        self._closed = True
        try:
            self._beside.end(failed=failed)
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
        """Return what a file of the model is to hold, by name: views of the parameters. Local."""
        return {name: self.parameters[name] for name in self.parameters}

    def require_open(self) -> None:
        """Refuse what a closed learner cannot do. Local."""
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
    """Return a learner. Local.

    Raises:
        UserError: it is none.
    """
    if not isinstance(learner, Learner):
        raise UserError(f"learner must be an open Learner: it is {kind_of(learner)}")
    return learner
