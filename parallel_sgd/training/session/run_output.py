"""Output of a session's run: the run folder, every rank's log, reports, and a progress bar."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ...data.sources.minibatches import size_summary
from ...errors import RankFailed, UserError
from ...files import append_line, reason
from ...options import Options
from ...validation import line_of
from ..learner import Learner
from ..reports.record import LOGS
from .evaluation import Evaluation
from .options import SessionOptions
from .progress_bar import ProgressBar, require_tqdm
from .run_folder import RunFolder, require_no_link
from .state import Progress, loss_curves
from .tracking_services import FAILED, FINISHED, KILLED, PREEMPTED


class RunOutput:
    """Writes the output of one run, on a rank that trains.

    Args:
        session: the checked options.
        learner: the session's learner.
        evaluation: makes the rows. If it is not `collective`, the first rank writes rows alone,
            while the other ranks train.

    Attributes:
        trained: whether a step has been taken.
        finished: whether the model is complete.
    """

    def __init__(self, session: SessionOptions, learner: Learner, evaluation: Evaluation) -> None:
        self._session, self._learner, self._comm = session, learner, learner.comm
        self._evaluation, self._collective = evaluation, evaluation.collective
        self._log: RankLog | None = None
        self._bar: ProgressBar | None = None
        self.trained = self.finished = False

    def lock_folder(self) -> None:
        """Keep other jobs from writing to the run's folder, if the folder exists. Collective."""
        if folder := self._session.folder:
            self.on_first_rank(folder.hold)

    def begin(self, rows: Sequence[Progress], total: int, begun: Callable[[], object]) -> None:
        """Begin to write. The folder's previous content is replaced. Collective.

        Args:
            rows: the rows so far, of a resumed run.
            total: samples of the whole run.
            begun: called on the first rank.
        """
        session, folder = self._session, self._session.folder

        def create() -> None:
            if session.progress_bar:
                require_tqdm()
            if session.tracker:
                session.tracker.require()
            if folder:
                folder.resumed = folder.resumed or self._learner.world.generation > 0
                folder.create([row.as_dict() for row in rows])
            begun()
            self._begin_to_track()
            if session.progress_bar:
                self._bar = ProgressBar(total, self._learner.samples)

        self.on_first_rank(create)
        if folder:
            if not self._learner.algorithm.asynchronous:
                self._learner.timer.measure_totals(self._learner.group)
            self._log = RankLog(folder.path, self._comm.world_ranks[self._comm.rank])
            self._comm.together(self._log.create)

    def show(self, samples: int) -> None:
        """Show on the progress bar the samples seen. Local."""
        if self._bar:
            self._bar.show(samples)

    def report_rows(self, rows: Sequence[Progress]) -> None:
        """Write rows, and report them. Collective if `collective`."""
        session = self._session
        folder, report, tracker = session.folder, session.report, session.tracker

        def report_rows() -> None:
            for row in rows:
                if folder:
                    folder.append_metrics(row.as_dict())
                    folder.write_status(self._status("training"), often=True)
                if tracker:
                    self._begin_to_track()  # the rank that tracked before may have failed
                    tracker.log(row)
                if report:
                    with self._bar.hidden() if self._bar else nullcontext():
                        run_callback(report, row)

        self.on_first_rank(report_rows)
        for row in rows:
            self._log_line(f"{row.samples} samples, {row.seconds} s, train loss {row.train_loss}")

    def complete(self, history: Sequence[Progress]) -> None:
        """Write the model and the last row, and close the folder. Collective.

        Args:
            history: all rows. The last row has not been reported yet.
        """
        folder = self._session.folder
        if folder:
            self.on_first_rank(lambda: self._write(folder, history))
        self.report_rows(history[-1:])
        self.on_first_rank(lambda: self._close("complete", FINISHED))

    def fail(self, error: BaseException) -> None:
        """Log the error that ends the run, and close the folder and the tracker's run. Local."""
        if self._log:
            self._log.write_error(error)
        # RankFailed: ranks that are threads were interrupted, or another one has failed.
        killed = isinstance(error, RankFailed) or not isinstance(error, Exception)
        end = KILLED if killed else FAILED
        with suppress(UserError):  # report the first error only
            self._close("failed", end, f"{type(error).__name__}: {line_of(error)}")
        self.finish_tracking(end)  # if the disk has refused the status

    def leave(self) -> None:
        """Close the folder of a run that was asked to leave, and has saved all state. Local.

        The rank leaves also if its disk refuses the status.
        """
        with suppress(UserError):
            self._close("preempted", PREEMPTED)

    def finish_tracking(self, end: str) -> None:
        """Close the tracker's run, as finished, failed, killed or preempted. Local.

        Only the first rank has a run: ranks that are threads may share the tracker.
        """
        if self._session.tracker and self._comm.rank == 0:
            self._session.tracker.finish(end)

    def close(self) -> None:
        """Remove the progress bar. Local."""
        if self._bar:
            self._bar.close()

    def on_first_rank(self, work: Callable[[], object]) -> None:
        """Run `work` once, on the first rank. If it fails, all ranks end.

        Collective if `collective`.
        """
        if self._collective or self.finished or not self.trained:
            first = CallOnce(work)  # after a failure another rank may be the first
            comm = self._comm
            self._learner.recovery.collective(
                lambda: comm.together(lambda: first() if comm.rank == 0 else None)
            )
        elif self._comm.rank == 0:
            try:
                work()
            except UserError as error:
                self._learner.fail(str(error))

    def _write(self, folder: RunFolder, history: Sequence[Progress]) -> None:
        folder.write_model(self._learner.model_arrays())
        curves = loss_curves(history)
        if folder.plot and curves:
            folder.write_loss_curves(curves)

    def _status(self, status: str, error: str | None = None) -> dict[str, Any]:
        """Return the content of the run's status file."""
        learner = self._learner
        optimizer = learner.local_step.optimizer
        return {
            "status": status,
            "error": error,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "algorithm": learner.algorithm.brief(),
            "optimizer": optimizer.brief() if isinstance(optimizer, Options) else str(optimizer),
            "parameters": int(learner.parameters.flat.size),
            "ranks": self._evaluation.ranks,
        }

    def _close(self, status: str, end: str, error: str | None = None) -> None:
        """Write the status, close the tracker's run, and release the folder, if this rank writes.

        The folder is released last: it keeps the number of the tracker's run.
        """
        folder = self._session.folder
        try:
            if folder and folder.writes:
                folder.write_status(self._status(status, error))
            self.finish_tracking(end)
        finally:
            if folder:
                folder.close()

    def _begin_to_track(self) -> None:
        """Open the tracker's run, if any and not open."""
        session, learner = self._session, self._learner
        if session.tracker:
            own = {} if session.folder is None else session.folder.options
            size = session.minibatch_size
            facts = {
                "ranks": learner.world.size,
                "algorithm": str(learner.algorithm),
                "optimizer": str(learner.local_step.optimizer),
                "epochs": session.epochs,
                "minibatch_size": size and size_summary(size),
                "seed": session.seed,
            }
            session.tracker.begin({**facts, **own}, session.folder, self._comm.timeout_s)

    def _log_line(self, text: str) -> None:
        """Write a line to this rank's log. If that fails, all ranks end."""
        if self._log is None:
            return
        try:
            self._log.write(text)
        except UserError as error:
            if self.finished:
                raise
            self._learner.fail(str(error))


class CallOnce:
    """Calls a function at the first call. Later calls do nothing, unless that call has failed."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function

    def __call__(self) -> None:
        if self._function is not None:
            self._function()
            self._function = None


def run_callback(callback: Callable[[Any], Any], row: Any) -> Any:
    """Call a user's callback and return its answer. Local.

    Raises:
        UserError: the callback has failed. To be raised on all ranks.
    """
    try:
        return callback(row)
    except (UserError, BrokenPipeError):  # BrokenPipeError: nobody reads the output
        raise
    except Exception as error:
        name = getattr(callback, "__name__", type(callback).__name__)
        raise UserError(
            f"callback {name} failed: {type(error).__name__}: {line_of(error)}"
        ) from error


class RankLog:
    """The log of one rank: lines with the time. Each line is written whole or not at all.

    Args:
        run: the run's folder, on this rank's disk or on a shared file system.
        rank: the rank's number.

    Local. No file stays open between two lines, so a kill loses no line.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.path = run / LOGS / f"rank-{rank:05d}.log"

    def create(self) -> None:
        """Make the folder, and append the first line. Lines of a resumed run stay.

        Raises:
            UserError: the folder cannot be made, or is a link.
        """
        require_no_link(self.path.parent)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"output={str(self.path.parent)!r} must be a folder: {reason(error)}"
            ) from error
        self.write(f"begin: process {os.getpid()} on {os.uname().nodename}")

    def write(self, text: str) -> None:
        """Append a line.

        Raises:
            UserError: the line cannot be written.
        """
        append_line("output", self.path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def write_error(self, error: BaseException) -> None:
        """Append the error that ends this rank. A failing disk is ignored.

        The error is reported elsewhere, too.
        """
        try:
            self.write(f"error: {type(error).__name__}: {line_of(error)}")
        except UserError:
            return
