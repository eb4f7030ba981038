"""Measure the common model: make rows of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ...communication import Communicator
from ...data import Sequences, require_same_data
from ...data.sequences import require_same_sequences
from ...errors import SharedError, UserError
from ..learner import Learner
from .cross_validation import CrossValidation
from .means import evaluate
from .minibatches import SessionMinibatches
from .options import SessionOptions
from .state import Progress, SessionState


class Evaluation:
    """Makes the rows of a session.

    Args:
        session: the checked options.
        learner: the session's learner.
        minibatches: the session's minibatches.

    Attributes:
        collective: all ranks make each row together. False: the first asynchronous worker makes
            rows alone.
    """

    def __init__(
        self, session: SessionOptions, learner: Learner, minibatches: SessionMinibatches
    ) -> None:
        self._objective, self._validation = session.objective, session.validation
        self._test = (
            None if session.test is None else CrossValidation(data=session.test, name="test")
        )
        self._learner, self._comm, self._minibatches = learner, learner.comm, minibatches
        self._asynchronous = learner.algorithm.asynchronous
        self.collective = not self._asynchronous or session.may_end
        self.ranks: list[dict[str, Any]] = []

    @property
    def has_rows(self) -> bool:
        """Return whether this rank makes rows. Local.

        After a failure this may be another rank than before.
        """
        return self.collective or self._comm.rank == 0

    def meet(self) -> dict[str, Any]:
        """Check that all ranks have the same data. Collective.

        Returns:
            Values that must be equal when the run is resumed, by name.
        """
        facts: dict[str, Any] = {}
        for measured in filter(None, (self._validation, self._test)):
            name, data = f"{measured.name} data", measured.dataset
            facts[f"number of {measured.name} samples"] = len(data)
            classes = self._objective.classes
            if isinstance(data, Sequences):
                facts[name] = require_same_sequences(
                    data, self._comm, dtype=self._objective.dtype, classes=classes
                )
            else:
                facts[name] = require_same_data(name, data, self._comm, classes=classes)
        return facts

    def row(self, state: SessionState, *, validates: bool) -> Progress:
        """Make a row of the present progress. Collective if `collective`.

        Args:
            validates: whether to measure the cross-validation's data.
        """

        def row() -> Progress:
            return self._row(state, validates=validates)

        return self._learner.recovery.collective(row) if self.collective else row()

    def _row(self, state: SessionState, *, validates: bool) -> Progress:
        metrics = {}
        if validates and self._validation is not None:
            metrics = self._metrics(self._validation)
        known = [(float(state.loss), state.count, state.seconds)]
        if not self._asynchronous:
            known = self._comm.allgather_object(known[0])
        losses, counts, seconds = zip(*known, strict=True)
        loss, count = sum(losses), sum(counts)
        learner, minibatches = self._learner, self._minibatches
        samples = learner.samples
        seen = (samples - minibatches.start) / minibatches.epoch
        return Progress(
            epoch=int(seen) if seen == int(seen) else round(seen, 6),
            samples=samples,
            train_loss=loss / count if count else None,
            **self.next_step_fields(state),
            seconds=round(max(seconds), 4),
            metrics=metrics,
            **self._report_fields(),
        )

    def next_step_fields(self, state: SessionState) -> dict[str, Any]:
        """Return the row's fields about the next step. Local."""
        samples, minibatches = self._learner.samples, self._minibatches
        rate = self._learner.local_step.lr
        factor = state.factor * minibatches.rate_factor(samples)
        return {
            "learning_rate": None if rate is None else rate * factor,
            "minibatch_size": minibatches.size_after(samples),
        }

    def final(self) -> dict[str, Any]:
        """Return the row's fields for the final model, with the final test.

        All ranks measure, also asynchronous workers. Collective, after `Learner.finish`.
        """
        return self._learner.recovery.collective(self._final)

    def _final(self) -> dict[str, Any]:
        metrics: dict[str, float] = {}
        for measured in filter(None, (self._validation, self._test)):
            with self._learner.timer.outside_training("evaluate"):
                metrics |= self._evaluated(measured, self._comm)
        return {"metrics": metrics, **self._report_fields()}

    def criterion(self, row: Progress) -> float | None:
        """Return a row's criterion, lower is better, or None if it is not known.

        Raises:
            SharedError: on all ranks, if there is no such metric.
        """
        if self._validation is None:
            return row.train_loss
        try:
            return self._validation.value(row)
        except UserError as error:
            self.fail(str(error))

    def fail(self, problem: str) -> NoReturn:
        """End training on all ranks, for a problem known to all ranks or to the first worker."""
        if not self.collective:
            self._learner.fail(problem)
        raise SharedError(problem)

    def _metrics(self, measured: CrossValidation) -> dict[str, float]:
        learner = self._learner
        if self.collective:
            with learner.evaluation(), self._first_workers_model():
                return self._evaluated(measured, self._comm)
        try:
            with learner.timer.outside_training("evaluate"), learner.shared_model():
                return self._evaluated(measured, Communicator.single())
        except UserError as error:
            learner.fail(str(error))

    def _evaluated(self, measured: CrossValidation, comm: Communicator) -> dict[str, float]:
        means = evaluate(self._objective, measured.dataset, comm, batch=measured.batch)
        return {f"{measured.name}_{name}": value for name, value in means.items()}

    @contextmanager
    def _first_workers_model(self) -> Iterator[None]:
        """Give all asynchronous workers the first worker's model for a `with` block. Collective."""
        if not self._asynchronous:
            yield
            return
        x = self._learner.parameters.flat
        local_model = x.copy()
        self._comm.broadcast(x)
        try:
            yield
        finally:
            x[...] = local_model

    def _report_fields(self) -> dict[str, Any]:
        """Return the algorithm's report and the bytes sent. Collective, unless asynchronous."""
        details = self._learner.report()
        if self._asynchronous:  # the bytes known to this rank
            workers = (details or {}).get("workers", [])
            kinds = ("bytes_sent", "bytes_received", "bytes_within")
            sent = sum(worker[kind] for worker in workers for kind in kinds)
        else:
            world = self._comm.world_ranks
            times = {name: round(s, 4) for name, s in self._learner.timer.totals().items()}
            own = {"rank": world[self._comm.rank], "host": self._comm.host, "seconds": times}
            gathered = self._comm.allgather_object((self._learner.bytes_sent, own))
            sent, self.ranks = sum(of for of, _ in gathered), [rank for _, rank in gathered]
        return {"bytes_sent": sent, "details": details}
