"""A training session: minibatches, cross-validation, callbacks, checkpoints, what a run writes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ...communication import RanksChanged
from ...communication.liveness.rank_status import BEGUN, OVER, report_session
from ...errors import SharedError, SharedProblem
from ..learner import require_learner
from ..recovery.snapshot import Snapshot
from .loop import TrainingRun
from .options import SessionOptions
from .preemption import Preemption
from .state import Progress

_sessions = itertools.count()  #: of this process, and of every other rank's


@dataclass(frozen=True, kw_only=True)
class TrainingSession(SessionOptions):
    """Trains a model to the end: what a loop of one's own over minibatches does, and more.

    Args:
        learner: of `parallel_sgd`, or of `parallel_sgd.torch`; its algorithm may be any.
        objective: a model of `parallel_sgd.models`, `parallel_sgd.torch.Objective`, or whatever has
            `backward` and `evaluate` as `Objective` says.
        train: a data set that every rank can read, or what makes one (as `data.Source` takes it); a
            source of minibatches; or a PyTorch `DataLoader` with `parallel_sgd.torch.sampler`. The
            last two know their minibatch sizes, their epochs (a source) and their seed.
        minibatch_size: samples of all ranks in a minibatch, or a mapping from the samples that all
            have seen to such: ``{0: 64, 100_000: 256}``.
        epochs: passes over the data.
        seed: of the order of the samples.
        rate_follows: what a change of the minibatch size does to the learning rate: nothing
            ("constant"), or it rises "linear" with the size, or with its square root ("sqrt"). None
            leaves the optimizer's rates as they are: `lr` constant, `lr_per_sample` linear.
        microbatch_size: samples that a rank computes at a time; gradients of several such are added
            up to its part of a minibatch. None: all at once.
        validation: data to measure the model on in the course of training.
        test: data to measure the final model on, at the end, by all ranks.
        progress_every: so many samples of all ranks lie between two rows of metrics; None: an
            epoch. Beside them there is one for every cross-validation.
        callbacks: called on all ranks with every row; False ends training on all.
        auto_minibatch_size, auto_learning_rate: adjust them to how training goes.
        not_finite: what becomes of a loss or a gradient that is not finite: "stop", "skip",
            "reduce", or a `NotFinitePolicy`. None: as the learner's own `not_finite` says.
        checkpoints: where and how often all state is saved, and what is resumed.
        folder: what a run leaves behind; the same on all ranks, of which the first one that trains
            writes all but the ranks' logs.
        report: called on the first rank that trains with every row, after it was written.
        started: called there before the first minibatch.
        progress_bar: whether that rank shows a bar on its standard error, by tqdm.

    Asynchronous workers come to each row at times of their own. The first one then measures the
    model alone, and nobody waits; but where callbacks or `patience` may end training, all workers
    meet at each row. Rates and sizes that adjust themselves need ranks that take steps together.

    Local; `run` is collective. Memory: `auto_minibatch_size` keeps a copy of all state; so do
    `auto_learning_rate` with `load_best_model`, and `restore_best`, together one; and
    ``not_finite="reduce"`` two.

    >>> import numpy as np, parallel_sgd as psgd
    >>> comm = psgd.Communicator.single()
    >>> model = psgd.models.SoftmaxRegression(4, 3)
    >>> learner = psgd.Learner(model.parameters, psgd.SGD(lr=0.5), psgd.DataParallelSGD(), comm)
    >>> data = psgd.data.Arrays(np.eye(4), np.array([0, 1, 2, 0]))
    >>> session = psgd.TrainingSession(
    ...     learner=learner,
    ...     objective=model,
    ...     train=data,
    ...     minibatch_size={0: 2, 20: 4},
    ...     epochs=30,
    ...     validation=psgd.CrossValidation(data=data, every=20, patience=3),
    ... )
    >>> session.run()[-1].metrics["validation_accuracy"]
    1.0
    """

    def run(self) -> list[Progress]:
        """Train, and return the rows of metrics, the same on all ranks. Collective.

        Ranks that only serve, and of asynchronous workers that do not meet all but the first,
        return no rows. The learner is finished then, and still open: another session begins where
        this one has ended, unless the algorithm has left its servers.

        Raises:
            UserError: on all ranks, if an argument is not as required on any, or they disagree; if
                data are bad, a callback or a metric fails, or the run's folder or a checkpoint
                cannot be written on any rank; if training diverges; or the checkpoint to be resumed
                is damaged or of another run.
            Preempted: on all ranks, a SystemExit: they were asked to leave, and all state is saved
            (`parallel-sgd run --preempt-on`).
        """
        require_learner(self.learner)
        preemption = Preemption(self.learner, saves=self.checkpoints is not None)
        if self.learner.serves:
            self.learner.finish()
            preemption.notify_servers()
            return []
        recovery, best, number = self.learner.recovery, Snapshot(), next(_sessions)
        if self.learner.comm.rank == 0:
            report_session(number, BEGUN)

        def attempt() -> list[Progress]:
            rows = self._run(best, preemption)
            if not recovery.end_session():
                raise RanksChanged
            return rows

        try:
            return recovery.run(attempt)
        except SharedError as error:
            if not self.learner.algorithm.roles.together and not self.learner.runner.failed:
                self.learner.fail(SharedProblem(error))  # servers have not heard of it
            raise
        finally:
            recovery.leave_session()
            if self.learner.comm.rank == 0:  # which may be another one than before
                report_session(number, OVER)

    def _run(self, best: Snapshot, preemption: Preemption) -> list[Progress]:
        def begun() -> TrainingRun:
            checked = self.learner.comm.together(self.checked)
            return TrainingRun(checked, self.learner, best, preemption).begin()

        return self.learner.recovery.collective(begun).run()
