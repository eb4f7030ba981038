"""The runs of Weights & Biases and MLflow: opened, fed with rows of numbers, and closed.

All calls may wait for a network: a background thread makes the calls (`tracker`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...validation import line_of

#: Longest waits at the beginning: of training for a service, and of Weights & Biases for the answer
#: to a new run. Before, it asks twice for the account, 5 s each, and after, it writes to the disk.
OPEN_S, ANSWER_S = 30.0, 10.0
END_S = 30.0  #: longest wait for the upload of the last rows
FAIL_S = 5.0  #: longest wait for the upload of the last rows, after an error
KILL_S = 1.0  #: the same after an interrupt: ranks in a notebook have 3 s for all of their ends

Row = Mapping[str, float]
"""The numbers of a row by name, among them "samples", and "time" in seconds since the epoch."""

FINISHED, FAILED, KILLED, PREEMPTED = "finished", "failed", "killed", "preempted"

_EXIT_CODES = {FINISHED: 0, FAILED: 1, KILLED: 130, PREEMPTED: os.EX_TEMPFAIL}
_MLFLOW_STATES = {FINISHED: "FINISHED", FAILED: "FAILED", KILLED: "KILLED", PREEMPTED: "KILLED"}

#: MLflow's limits of a request and of a parameter's text.
_MOST_METRICS, _MOST_PARAMS, _MOST_TEXT = 1000, 100, 6000


class TrackedRun(ABC):
    """A run of a service.

    Args:
        project: the project, or experiment, of the run.
        name: the run's name.
        run_id: the run to continue. None: a new run.
        config: the options of training.
        folder: the run's folder, if any.

    Attributes:
        run_id: the run's number at the service, once known.
    """

    def __init__(
        self,
        project: str,
        name: str | None,
        run_id: str | None,
        config: Mapping[str, Any],
        folder: Path | None,
    ) -> None:
        self.project, self.name, self.config, self.folder = project, name, config, folder
        self.run_id = run_id

    @staticmethod
    @abstractmethod
    def require() -> None:
        """Check that the service can be used.

        Raises:
            UserError: the package is not installed, refuses its settings, or has no account.
        """

    @abstractmethod
    def open(self) -> str | None:
        """Open the run, a new one or that of `run_id`. May be called again after an exception.

        Returns:
            A problem to warn of, in one line, or None.
        """

    @abstractmethod
    def log(self, rows: Sequence[Row]) -> int:
        """Log the first of these rows, as many as fit into a request.

        Returns:
            How many rows have been logged, at least one.
        """

    @abstractmethod
    def close(self, end: str) -> None:
        """Close the run, as finished, failed, killed or preempted."""


class WandbRun(TrackedRun):
    """A run of Weights & Biases. Without a connection the run is kept on the disk."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.run_id = self.run_id or secrets.token_hex(4)
        self._run: Any = None

    @staticmethod
    def require() -> None:
        """Check that wandb is installed, and has an API key unless it is offline."""
        wandb = _imported("wandb")
        try:
            usable = _has_wandb_key(wandb)
        except Exception as error:  # of a setting or a key: all ranks must learn the problem
            raise UserError(f"tracker='wandb' cannot be used: {line_of(error)}") from error
        if not usable:
            raise UserError(
                "tracker='wandb' needs an API key: run `wandb login`, or set WANDB_API_KEY, or "
                "keep the run on the disk with WANDB_MODE=offline"
            )

    def open(self) -> str | None:
        """Open the run; offline if the servers cannot be reached."""
        wandb = _imported("wandb")
        try:
            self._run = self._opened(wandb)
        except wandb.Error as error:
            # The failed attempt keeps the run's number until the program ends.
            self._run = self._opened(
                wandb, mode="offline", id=f"{self.run_id}-offline", resume=None
            )
            command = f"wandb sync --id {self.run_id} {self._run.settings.sync_dir}"
            return f"the run is kept on the disk, for `{command}`: {line_of(error)}"
        return None

    def _opened(self, wandb: Any, **options: Any) -> Any:
        folder = None if self.folder is None or "WANDB_DIR" in os.environ else str(self.folder)
        limits = {"init_timeout": ANSWER_S, "finish_timeout": END_S}
        ours = {k: v for k, v in limits.items() if f"WANDB_{k.upper()}" not in os.environ}
        run = wandb.init(
            **{
                "project": self.project,
                "name": self.name,
                "id": self.run_id,
                "resume": "allow",
                "config": dict(self.config),
                "dir": folder,
                "reinit": "create_new",  # beside a run of the program's own
                "settings": wandb.Settings(**ours),
                **options,
            }
        )
        run.define_metric("*", step_metric="samples")
        return run

    def log(self, rows: Sequence[Row]) -> int:
        """Log a row; wandb itself sends rows in the background."""
        self._run.log({name: value for name, value in rows[0].items() if name != "time"})
        return 1

    def close(self, end: str) -> None:
        """Finish the run, and wait up to `END_S` for its upload."""
        if end == PREEMPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES[end])


class MlflowRun(TrackedRun):
    """A run of MLflow, at a tracking server or in a folder."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._client: Any = None

    @staticmethod
    def require() -> None:
        """Check that mlflow is installed, without importing it: the import takes seconds."""
        if importlib.util.find_spec("mlflow") is None:
            raise _missing("mlflow", "No module named 'mlflow'")

    def open(self) -> str | None:
        """Open the run, and log the options as parameters."""
        self._client = _mlflow_client()
        run = None if self.run_id is None else self._found(self.run_id)
        if run is None:
            experiment = self._client.get_experiment_by_name(self.project)
            number = (
                self._client.create_experiment(self.project)
                if experiment is None
                else experiment.experiment_id
            )
            tags = {"mlflow.source.name": sys.argv[0], "mlflow.source.type": "LOCAL"}
            run = self._client.create_run(number, run_name=self.name, tags=tags)
            self.run_id = run.info.run_id
        self._log_params(run.data.params)
        return None

    def _found(self, run_id: str) -> Any:
        """Return the run to continue, or None if this server does not have the run."""
        errors = importlib.import_module("mlflow.exceptions")
        try:
            self._client.update_run(run_id, status="RUNNING")
            return self._client.get_run(run_id)
        except errors.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None

    def _log_params(self, logged: Mapping[str, str]) -> None:
        """Log options as parameters. MLflow's parameters never change: changed options of a resumed
        run are tags."""
        entities = importlib.import_module("mlflow.entities")
        texts = {name: str(value)[:_MOST_TEXT] for name, value in flat(self.config)}
        new = [entities.Param(name, texts[name]) for name in texts if name not in logged]
        for i in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self.run_id, params=new[i : i + _MOST_PARAMS])
        for name, text in texts.items():
            if logged.get(name, text) != text:
                self._client.set_tag(self.run_id, f"resumed.{name}", text)

    def log(self, rows: Sequence[Row]) -> int:
        """Log rows as metrics, with the samples as steps."""
        entities = importlib.import_module("mlflow.entities")
        metrics: list[Any] = []
        logged = 0
        for row in rows:
            of_row = [
                entities.Metric(name, float(value), int(1000 * row["time"]), int(row["samples"]))
                for name, value in row.items()
                if name not in ("samples", "time")
            ]
            if logged and len(metrics) + len(of_row) > _MOST_METRICS:
                break
            metrics += of_row
            logged += 1
        for i in range(0, len(metrics), _MOST_METRICS):  # of a row with more: several requests
            self._client.log_batch(self.run_id, metrics=metrics[i : i + _MOST_METRICS])
        return logged

    def close(self, end: str) -> None:
        """Set the run's state."""
        self._client.set_terminated(self.run_id, _MLFLOW_STATES[end])


SERVICES: dict[str, type[TrackedRun]] = {"wandb": WandbRun, "mlflow": MlflowRun}


def flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all options by MLflow's names, those in a mapping as "outer.inner"; no Nones."""
    for key, value in config.items():
        name = before + re.sub(r"[^\w\-. :/]", "_", str(key))
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.")
        elif value is not None:
            yield name, value


def _mlflow_client() -> Any:
    """Return a client of the store that the program or the environment names.

    MLflow's own default is a database, which mlflow-skinny cannot write: without SQLAlchemy the
    default is the folder ``mlruns``. MLflow asks for a variable before it writes to a folder.
    """
    mlflow = _imported("mlflow")
    if mlflow.is_tracking_uri_set() or importlib.util.find_spec("sqlalchemy") is not None:
        uri = mlflow.get_tracking_uri()
    else:
        uri = Path("mlruns").absolute().as_uri()
    if re.match(r"file:|(?!\w+:)", uri):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return mlflow.MlflowClient(tracking_uri=uri)


def _has_wandb_key(wandb: Any) -> bool:
    """Return whether wandb has an API key, or needs none."""
    online = wandb.setup().settings.mode in ("online", "run", "shared")
    # Beside a run of the program's own, which has logged in, `login` does nothing.
    return not online or wandb.run is not None or wandb.login(prompt=False, verify=False)


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _missing(package, error) from error


def _missing(package: str, why: object) -> UserError:
    return UserError(
        f"tracker={package!r} needs {package} ({why}): pip install '.[{package}]' from the checkout"
    )
