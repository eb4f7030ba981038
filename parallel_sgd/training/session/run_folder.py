"""The folder of a run: options, metrics, model and figure, written by one rank.

All ranks write checkpoints to its subfolder ``checkpoints``: see `checkpoint`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ... import runtime
from ...communication.job_environment import job_name, restarts
from ...data import Standardization
from ...data.standardization import STANDARDIZATION
from ...errors import UserError
from ...files import append_line, content_of, part_path, reason, write_whole, writing
from ...kernels import array_module
from ...palette import PALETTE
from ...parameters import Parameters
from ...validation import BOTH, checked_path, choice, mapping, shown
from ..checkpoint.files import CHECKPOINTS
from ..checkpoint.folder_lock import LOCK, FolderLock
from ..checkpoint.schema import parsed
from ..reports import RunRecord, run_page
from ..reports.record import METRICS, OPTIONS, STATUS

WHAT = "output"  #: the argument's name in errors
CONFIG = "config.toml"  #: the only file that is written before `OPTIONS`
REPORT = "report.html"
REPORT_PAUSE_S = 10.0  #: least time between two reports of a run under way
TENSORBOARD = "tensorboard"  #: subfolder of TensorBoard's files
WANDB = "wandb"  #: subfolder made by Weights & Biases


class RunFolder:
    """The folder of one run.

    One process at a time writes to the folder, from `hold` or `create` to `close`: see
    `folder_lock`. Every file is written whole or not at all; metrics.jsonl grows line by line. A
    file that cannot be written (on a full disk, say) raises a UserError. The folder may be a link.
    All files stay inside it: a link in place of a file is replaced or refused. Local.

    Args:
        path: made by `create`, with its parents; must not exist, or be empty.
        options: the options of the run, written as options.json.
        config: a configuration file to repeat the run, written as config.toml.
        resumed: the folder belongs to a run that is resumed. Not needed in a restarted job, whose
            own folder is taken over.
        plot: whether the session draws loss.png, with Matplotlib.
        tensorboard: also write metrics for TensorBoard, to ``tensorboard/``.
        standardization: the standardization of the features, written as standardization.npz, to be
            read by `data.read_standardization`.
    Raises:
        UserError: an argument is not as required.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        *,
        config: str | None = None,
        resumed: bool = False,
        plot: bool = False,
        tensorboard: bool = False,
        standardization: Standardization | None = None,
    ) -> None:
        if not isinstance(config, str | None):
            raise UserError(f"config={shown(config)} must be a text, or None")
        self.path, self.options = checked_path("output", path), mapping("options", options)
        self.resumed, self.plot = choice("resumed", resumed, BOTH), choice("plot", plot, BOTH)
        self._config, self._tensorboard = config, choice("tensorboard", tensorboard, BOTH)
        self._standardization = standardization
        self._events: Any = None  #: TensorBoard's writer
        self.writes = False  #: this object has written, and not another rank's
        self._report_at = 0.0  #: the earliest time of the next report, of `runtime.perf_counter`
        self._lock = FolderLock(WHAT, self.path)

    def hold(self) -> None:
        """Keep other processes from writing to the folder, if it exists.

        Raises:
            UserError: another process is writing. The error names the process.
        """
        self._lock.hold(make=False)

    def create(self, metrics: Sequence[Mapping[str, Any]] = ()) -> None:
        """Make the folder, or take over a resumed run's folder. Write options and configuration.

        Args:
            metrics: the first rows of metrics.jsonl.
        Raises:
            UserError: the folder cannot be made, another process writes there, or files are inside
                and the folder is not `resumed`.
        """
        try:
            self._create(metrics)
        except BaseException:
            self._lock.release()
            raise

    def _create(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.hold()
            filled = self._holds_a_run()
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(
                f"output={str(self.path)!r} must be a folder: {reason(error)}"
            ) from error
        if filled and not (self.resumed or self._is_of_this_job()):
            raise UserError(
                f"output={str(self.path)!r} must be a new or empty folder{self._hint()}"
            )
        for name in (CHECKPOINTS, TENSORBOARD, WANDB):
            require_no_link(self.path / name)
        if self.plot:
            require_installed_matplotlib()
        if self._config is not None:
            text = self._config
            self._write(CONFIG, lambda path: path.write_text(text))
        job = job_name()
        self.write_json(OPTIONS, {**self.options, **({"job": job} if job else {})})
        self._begin_to_write()
        if self._standardization is not None:
            self._write(STANDARDIZATION, self._standardization.write)
        if metrics or filled or self.resumed:
            lines = [json.dumps(row, allow_nan=False) + "\n" for row in metrics]
            self._write(METRICS, lambda path: path.write_text("".join(lines)))

    def _hint(self) -> str:
        """Advise how to resume the run in the folder, as the end of an error text."""
        if not (self.path / OPTIONS).is_file():
            return ""
        return f": it contains a run, which --resume {shlex.quote(str(self.path))} continues"

    def _is_of_this_job(self) -> bool:
        """Return whether this job wrote the folder, before its restart."""
        if not restarts():
            return False
        try:
            written = parsed(content_of(OPTIONS, self.path / OPTIONS))
        except (OSError, UserError):
            return False
        return isinstance(written, dict) and written.get("job") == job_name()

    def _holds_a_run(self) -> bool:
        """Return whether the folder holds more than a run killed before it wrote its options."""
        begun = {
            LOCK,
            CONFIG,
            part_path(self.path / CONFIG).name,
            part_path(self.path / OPTIONS).name,
        }
        return any(path.name not in begun for path in self.path.iterdir())

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON object as file `name`."""
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        self._write(name, lambda path: path.write_text(text))

    def _begin_to_write(self) -> None:
        self.writes = True
        if self._tensorboard:
            writer = require_tensorboard()
            with writing(WHAT, self.path / TENSORBOARD):
                self._events = writer(str(self.path / TENSORBOARD))

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl, and its numbers to TensorBoard's file."""
        self._lock.hold()  # the rank that wrote before may have failed
        if not self.writes:  # it has, perhaps after it has written this row
            self._begin_to_write()
            if self._last_samples() == metrics["samples"]:
                return
        append_line(WHAT, self.path / METRICS, json.dumps(metrics, allow_nan=False))
        if self._events is None:
            return
        with writing(WHAT, self.path / TENSORBOARD):
            for name, value in metrics.items():
                if isinstance(value, int | float) and name != "samples":
                    self._events.add_scalar(name, value, metrics["samples"])
            self._events.flush()

    def write_status(self, status: Mapping[str, Any], *, often: bool = False) -> None:
        """Write status.json, and the run's report as report.html.

        Args:
            status: a JSON object, described at `reports.RunRecord`.
            often: skip both files if they were written a short time ago.
        """
        begin = runtime.perf_counter()
        if often and begin < self._report_at:
            return
        self.write_json(STATUS, status)
        self.write_report()
        end = runtime.perf_counter()
        self._report_at = end + max(REPORT_PAUSE_S, 50 * (end - begin))

    def write_report(self) -> None:
        """Write report.html anew, from the folder's present files."""
        page = run_page(RunRecord.read(self.path))
        self._write(REPORT, lambda path: path.write_text(page))

    def _last_samples(self) -> int | None:
        """Return the samples of the last row of metrics.jsonl, or None."""
        with suppress(FileNotFoundError, ValueError, IndexError, KeyError):
            last = (self.path / METRICS).read_text().splitlines()[-1]
            return int(json.loads(last)["samples"])
        return None

    def close(self) -> None:
        """Close TensorBoard's file, and release the folder to other processes.

        Raises:
            UserError: the rest of TensorBoard's file cannot be written.
        """
        events, self._events = self._events, None
        try:
            if events is not None:
                with writing(WHAT, self.path / TENSORBOARD):
                    events.close()
        finally:
            self._lock.release()

    def write_model(self, model: Parameters | Mapping[str, Any]) -> None:
        """Write a model's arrays by name as model.npz, to be read by `numpy.load`.

        Args:
            model: its parameters, or the result of `Learner.model_arrays`.
        """

        def write(path: Path) -> None:
            with path.open("wb") as file:
                np.savez(file, **{name: _on_host(model[name]) for name in model})

        self._write("model.npz", write)

    def write_loss_curves(self, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Draw loss against samples as loss.png.

        Args:
            curves: for every name, its points (samples, loss).
        """
        require_installed_matplotlib()
        # Without pyplot, whose backend, in a notebook, is the one that shows figures in cells.
        kind = importlib.import_module("matplotlib.figure").Figure
        figure = kind(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        for i, (name, points) in enumerate(curves.items()):
            samples, losses = zip(*points, strict=True)
            style = ("-", "--", ":")[i % 3]
            color = PALETTE[i % len(PALETTE)]
            axes.plot(samples, losses, style, color=color, label=name, linewidth=1.8)
        axes.set_yscale("log")
        axes.set_xlabel("samples seen by all ranks")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3, which="both")
        axes.legend(frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        self._write("loss.png", lambda path: figure.savefig(path, dpi=150, format="png"))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        write_whole(WHAT, self.path / name, write, follow=False)


def _on_host(array: Any) -> Any:
    module = array_module(array)
    return array if module is np else module.asnumpy(array)


def require_no_link(path: Path) -> None:
    """Check that a folder inside a run's folder is not a link.

    Raises:
        UserError: the folder is a link.
    """
    if path.is_symlink():
        raise UserError(
            f"output={str(path)!r} must be a folder: it is a link, and a run writes nothing "
            "outside its folder"
        )


def require_tensorboard() -> Any:
    """Return the class that writes for TensorBoard.

    Raises:
        UserError: tensorboardX is not installed.
    """
    try:
        return importlib.import_module("tensorboardX").SummaryWriter
    except ImportError as error:
        raise UserError(
            f"tensorboard=True needs tensorboardX ({error}): "
            "pip install '.[tensorboard]' from the checkout"
        ) from error


def require_installed_matplotlib() -> None:
    """Check that Matplotlib is installed, without importing it.

    The import takes half a second, and training begins first.

    Raises:
        UserError: Matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise _without_matplotlib("No module named 'matplotlib'")


def require_matplotlib() -> Any:
    """Return Matplotlib's pyplot, set to draw to files.

    Raises:
        UserError: Matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise _without_matplotlib(error) from error


def _without_matplotlib(why: object) -> UserError:
    return UserError(
        f"the loss curve needs matplotlib ({why}): "
        "pip install '.[train]' from the checkout, or turn the curve off with --no-plot"
    )
