"""Train a model in a session: minibatches, cross-validation, callbacks, checkpoints, run folder."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass

from ...communication import RanksChanged
from ...communication.liveness.rank_status import Status, report_status
from ...errors import RanksLost, SharedError, SharedProblem, UserError
from ..learner import require_learner
from ..recovery.snapshot import Snapshot
from .loop import TrainingRun
from .options import SessionOptions
from .preemption import Preemption
from .state import Progress

_sessions = itertools.count()  #: number of the session, the same on all ranks


@dataclass(frozen=True, kw_only=True)
class TrainingSession(SessionOptions):
    """Trains a model to the end: a complete loop over minibatches, with evaluation and checkpoints.

    Asynchronous workers reach each row at different times. The first worker then measures the model
    alone, and no worker waits. But if callbacks or `patience` may end training, all workers meet at
    each row. Automatic rates and sizes need ranks that step together.

    Args:
        learner: a learner of `parallel_sgd` or of `parallel_sgd.torch`, with any algorithm.
        objective: a model of `parallel_sgd.models`, `parallel_sgd.torch.Objective`, or any object
            with `backward` and `evaluate` as in `Objective`.
        train: a data set readable by every rank, or an argument of `data.Source` for a data set; a
            source of minibatches; or a PyTorch `DataLoader` with `parallel_sgd.torch.sampler`.
            Source and loader have their own minibatch sizes and seed, and a source its own epochs.
        minibatch_size: samples of all ranks in a minibatch, or a mapping from samples seen by all
            ranks to sizes: ``{0: 64, 100_000: 256}``.
        epochs: passes over the data.
        seed: seed of the order of the samples.
        rate_follows: effect of the minibatch size on the learning rate: none ("constant"),
            proportional ("linear"), or by the square root ("sqrt"). None leaves the optimizer's
            rates as they are: `lr` constant, `lr_per_sample` linear.
        microbatch_size: samples computed at a time on each rank. The gradients of several
            microbatches are added up to the rank's part of a minibatch. None: all samples at once.
        shares: each rank's share of a minibatch: numbers, or "measured": see `data.Source`.
        validation: data to measure the model on during training.
        test: data to measure the final model on, at the end, by all ranks.
        progress_every: samples of all ranks between two rows of metrics. None: an epoch. Each
            cross-validation adds a row.
        callbacks: functions called on all ranks with every row; again with a row that is made again
            after a failure of ranks. Return False to end training on all ranks.
        auto_minibatch_size: adjusts the minibatch size to the progress of training.
        auto_learning_rate: adjusts the learning rate to the progress of training.
        not_finite: treatment of a loss or a gradient that is not finite: "stop", "skip", "reduce",
            or a `NotFinitePolicy`. None: the learner's own `not_finite`.
        checkpoints: folder and interval of checkpoints, and the checkpoint to resume.
        folder: the run's folder, the same on all ranks. The first training rank writes all files
            but the ranks' logs.
        tracker: logs every row to Weights & Biases or MLflow, on the first training rank.
        report: called with every row on the first training rank, after the row was written.
        started: called with the learner on the first training rank, before the first minibatch.
        progress_bar: show a bar on the standard error of the first training rank, with tqdm.

    Local; `run` is collective. Memory: `auto_minibatch_size` keeps a copy of all state;
    `auto_learning_rate` with `load_best_model`, and `restore_best`, together keep one copy; and
    ``not_finite="reduce"`` keeps two.

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

        Ranks that only serve return no rows, and neither do asynchronous workers after the first,
        if workers do not meet at rows. The learner is then finished, and still open: another
        session begins at the end of this one, unless the algorithm has released its servers.

        Raises:
            UserError: on all ranks, if an argument is wrong on any rank, or the ranks disagree; if
                data are bad, a callback or a metric fails, or the run's folder or a checkpoint
                cannot be written on any rank; if training diverges; or if the checkpoint to resume
                is damaged or of another run.
            Preempted: on all ranks, a SystemExit: the ranks were asked to exit, and all state is
                saved (`parallel-sgd run --preempt-on`).
        """
        require_learner(self.learner)
        preemption = Preemption(self.learner, saves=self.checkpoints is not None)
        if self.learner.serves:
            self.learner.finish()
            preemption.notify_servers()
            return []
        recovery, best, number = self.learner.recovery, Snapshot(), next(_sessions)
        if self.learner.comm.rank == 0:
            report_status(Status.SESSION_BEGUN, number=number)

        latest: list[TrainingRun] = []

        def begun() -> TrainingRun:
            checked = self.learner.comm.together(self.checked)
            run = TrainingRun(checked, self.learner, best, preemption, *latest)
            latest[:] = [run.begin()]
            return run

        def attempt() -> list[Progress]:
            rows = recovery.collective(begun).run()
            if not recovery.end_session():
                raise RanksChanged
            return rows

        try:
            return recovery.run(attempt)
        except SharedError as error:
            if not self.learner.algorithm.roles.together and not self.learner.runner.failed:
                # RanksLost: a rank has failed meanwhile. UserError: the same problem.
                with suppress(RanksLost, UserError):
                    self.learner.fail(SharedProblem(error))  # inform the servers
            raise
        finally:
            recovery.leave_session()
            if self.learner.comm.rank == 0:  # after a failure rank 0 may be another process
                report_status(Status.SESSION_FINISHED, number=number)
