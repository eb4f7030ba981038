"""Log the rows of a session to Weights & Biases or MLflow: one rank, in the background."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import runtime
from ...communication import InBackground
from ...communication.stderr import write_stderr
from ...errors import UserError
from ...files import content_of
from ...validation import choice, line_of, shown
from ..checkpoint.schema import parsed
from .run_folder import RunFolder
from .state import Progress
from .tracking_services import (
    END_S,
    FAIL_S,
    FINISHED,
    KILL_S,
    KILLED,
    OPEN_S,
    SERVICES,
    Row,
    TrackedRun,
)

PROJECT = "parallel_sgd"
RUN_IDS = "tracker.json"  #: in a run's folder: the run's number by service

RETRY_S = 30.0  #: pause after a failed upload
PARTS = 4  #: a wait for a service is at most this part of the ranks' wait for each other
GOES_ON = "; training goes on"
MOST_ROWS = 1000  #: handed to a service at a time
MOST_TEXT = 600  #: characters of a service's error


class Tracker:
    """Logs each row of a session as a run of Weights & Biases or MLflow.

    Only the first training rank logs, with the samples of all ranks as the step. The run's options
    are its configuration: those of the `RunFolder`, and the session's. In the end the run is
    finished, failed or killed. A resumed run continues: its number is kept in the run's folder.

    Rows are sent by a background thread. If the service cannot be reached, a line on stderr says
    so, training goes on, and the upload is tried again. At its end training waits for the last
    rows, at most half a minute, and at most a quarter of the communicator's `timeout_s`.

    Args:
        service: "wandb" (the extra ``[wandb]``) or "mlflow" (the extra ``[mlflow]``). Both read
            their own variables: WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI …
        project: the project of Weights & Biases, or MLflow's experiment.
        name: the run's name. None: the name of the run's folder, else the service's choice.
    Raises:
        UserError: an argument is not as required.

    Local.

    >>> Tracker("wandb", project="digits")
    Tracker('wandb', project='digits', name=None)
    """

    def __init__(self, service: str, project: str = PROJECT, name: str | None = None) -> None:
        self.service = choice("service", service, tuple(SERVICES))
        for argument, value in {"project": project, "name": "-" if name is None else name}.items():
            if not isinstance(value, str) or not value.strip():
                raise UserError(f"{argument}={shown(value)} must be a text")
        self.project, self.name = project, name
        self._usable = False  #: checked
        self._sender: Sender | None = None
        self._folder: RunFolder | None = None
        self._kept: dict[str, str] = {}  #: the run's numbers in the folder
        self._longest_s = math.inf  #: wait for the service

    def __repr__(self) -> str:
        return f"Tracker({self.service!r}, project={self.project!r}, name={self.name!r})"

    def require(self) -> None:
        """Check that the service can be used.

        Raises:
            UserError: the package is not installed, refuses its settings, or has no account.
        """
        if not self._usable:
            SERVICES[self.service].require()  # may ask servers for the name of the account
            self._usable = True

    def begin(
        self, config: Mapping[str, Any], folder: RunFolder | None, timeout_s: float = math.inf
    ) -> None:
        """Open the run in the background, and wait for this a few seconds.

        Does nothing if the run is open.

        Args:
            config: the options of training.
            folder: keeps the run's number.
            timeout_s: longest wait of the other ranks for this rank.
        Raises:
            UserError: the service cannot be used, or the folder cannot be read or written.
        """
        if self._sender is not None:
            return
        self.require()
        self._folder, self._longest_s = folder, timeout_s / PARTS
        path = None if folder is None else folder.path
        name = self.name or (None if path is None else path.resolve().name)
        self._kept = {} if path is None else run_ids(path)
        run_id = self._kept.get(self.service)
        run = SERVICES[self.service](self.project, name, run_id, config, path)
        self._sender = Sender(self.service, run)
        self._sender.wait_until_open(min(OPEN_S, self._longest_s))
        self._keep_run_id(self._sender)

    def log(self, row: Progress) -> None:
        """Log the numbers of a row."""
        assert self._sender is not None
        self._sender.log({**numbers(row), "time": time.time()})
        self._keep_run_id(self._sender)

    def finish(self, end: str = FINISHED) -> None:
        """Close the run, and wait for the upload of the last rows: `END_S`, after an error
        `FAIL_S`, after an interrupt `KILL_S`.

        Args:
            end: finished, failed, killed or preempted.
        """
        sender, self._sender = self._sender, None
        if sender is not None:
            seconds = {FINISHED: END_S, KILLED: KILL_S}.get(end, FAIL_S)
            sender.finish(end, min(seconds, self._longest_s))
            try:
                self._keep_run_id(sender)
            except UserError as error:  # the model is complete, or all state is saved
                write_stderr(f"parallel_sgd: {self.service}: the run's number is not kept: {error}")

    def _keep_run_id(self, sender: Sender) -> None:
        """Write the run's number to the folder, once known."""
        run_id = sender.run.run_id
        if self._folder is None or run_id in (None, self._kept.get(self.service)):
            return
        self._kept[self.service] = run_id
        self._folder.write_json(RUN_IDS, self._kept)


class Sender:
    """Sends rows to a service from a background thread.

    Args:
        name: the service's name, for warnings.
        run: the run, not open yet.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.run = name, run
        self._rows: list[Row] = []
        self._end: str | None = None
        self._stopped = self._warned = False
        self._problem: str | None = None  #: of the last call, or of the wait for it
        self._opened, self._over = runtime.Event(), runtime.Event()
        self._changed = runtime.Condition()
        InBackground(f"tracker {name}", self._work, self._stop, reports=False)

    def wait_until_open(self, seconds: float) -> None:
        """Wait until the run is open, or could not be opened at the first try."""
        if not self._opened.wait(seconds):
            self._warn(f"no answer within {seconds:g} s")

    def log(self, row: Row) -> None:
        """Hand over a row."""
        with self._changed:
            self._rows.append(row)
            self._changed.notify_all()

    def finish(self, end: str, seconds: float) -> None:
        """Close the run, and wait for this."""
        with self._changed:
            self._end = end
            self._changed.notify_all()
        self._over.wait(seconds)
        with self._changed:
            late, self._stopped = len(self._rows), True
            self._changed.notify_all()
        if late:
            why = "" if self._problem is None else f" ({self._problem})"
            self._print(
                f"{late} rows have not arrived{why}; a run's folder has them in metrics.jsonl"
            )
        elif not self._over.is_set():
            self._print(f"the end of the run is not confirmed within {seconds:g} s")

    def _stop(self) -> None:
        """Give up. Called as the program ends."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self) -> None:
        """Open the run, send rows as they come, and close the run."""
        try:
            while not self._tried(self._open):
                if not self._paused():
                    return
            while self._has_work():
                if not self._tried(self._send) and not self._paused():
                    return
            if self._end is not None:
                self._close(self._end)
        finally:
            self._opened.set()
            self._over.set()

    def _open(self) -> None:
        problem = self.run.open()
        if problem is not None:
            self._print(shortened(problem), GOES_ON)

    def _send(self) -> None:
        with self._changed:
            rows = self._rows[:MOST_ROWS]
        logged = self.run.log(rows)
        with self._changed:
            del self._rows[:logged]  # none of them is sent again, if the next request fails

    def _close(self, end: str) -> None:
        try:
            self.run.close(end)
        except Exception as error:  # as in `_tried`, but said in any case: no row tells of it
            self._print(f"the run could not be closed: {shortened(line_of(error))}")

    def _tried(self, call: Any) -> bool:
        """Make a call of the service. Return False, after a warning, if the call has failed."""
        try:
            call()
        except Exception as error:  # of a network, a disk or a server: training goes on
            self._warn(line_of(error))
            return False
        finally:
            self._opened.set()
        self._problem = None
        return True

    def _warn(self, problem: str) -> None:
        """Keep a problem for the last line, and print the first one."""
        self._problem = shortened(problem)
        if not self._warned:
            self._print(self._problem, GOES_ON)

    def _print(self, problem: str, then: str = "") -> None:
        self._warned = True
        write_stderr(f"parallel_sgd: {self.name}: {problem}{then}")

    def _has_work(self) -> bool:
        """Wait for rows or the end. Return whether there are rows to send."""
        with self._changed:
            # bounded: the end of the session, or of the program, ends it
            self._changed.wait_for(
                lambda: bool(self._rows) or self._end is not None or self._stopped
            )
            return bool(self._rows) and not self._stopped

    def _paused(self) -> bool:
        """Wait before the next try. Return False if nobody waits for the result any more."""
        with self._changed:
            last = self._end is not None
            self._changed.wait_for(lambda: self._stopped or (self._end is not None), RETRY_S)
            return not (self._stopped or last)


def shortened(problem: str) -> str:
    """Return a service's error, without the end of a long one. Local."""
    return problem if len(problem) <= MOST_TEXT else f"{problem[:MOST_TEXT]}…"


def numbers(row: Progress) -> dict[str, float]:
    """Return the numbers of a row by name. Local."""
    values = row.finite().as_dict()
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def run_ids(folder: Path) -> dict[str, str]:
    """Return the run's numbers at the services, by name, as kept in its folder.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / RUN_IDS
    if not path.is_file():
        return {}
    try:
        kept = parsed(content_of(RUN_IDS, path))
    except UserError as error:
        raise UserError(f"{str(path)!r} {error}") from None
    if not isinstance(kept, dict) or not all(isinstance(value, str) for value in kept.values()):
        raise UserError(f"{str(path)!r} must have a text for each service")
    return kept
