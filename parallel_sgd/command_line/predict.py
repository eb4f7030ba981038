"""Write the predictions of a trained model as CSV: `parallel-sgd predict`.

The run's folder holds everything needed: the options of the model (``config.toml``), facts about
the training data (``options.json``), the parameters (``model.npz``), and the mean and scale of
standardized features (``standardization.npz``). A single process.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from ..argument_parser import Parser
from ..communication import launched_rank
from ..data import FORMATS, Arrays, Dataset, Task, read_standardization
from ..data.formats import load_to_test
from ..data.readers.files import npz_member, npz_names
from ..data.tasks import TASKS
from ..errors import UserError
from ..files import content_of, write_whole
from ..models import Model, use_gpu
from ..training.checkpoint.schema import parsed
from ..training.reports.record import OPTIONS
from ..training.session.initial_model import MODEL
from ..validation import checked_path, choice, integer, require_use, shown
from .train.arguments import read
from .train.data import BUNDLED, TrainingData, read_data, reader_options
from .train.model import TrainingModel, make_model

CONFIG = "config.toml"
BATCH = 1024  #: samples of a batch


def main(argv: Sequence[str]) -> int:
    """Predict as the command line requests, and return 0.

    Raises:
        UserError: an error in the arguments, the run's folder or the data.
    """
    args = _parser().parse_args(argv)
    if launched_rank():  # under mpiexec only rank 0 predicts
        return 0
    run = _run(args)
    data = _data(args, run)
    if args.device == "cuda":
        use_gpu(0)
    model, data = _model(args, run, data)
    predicting = _Predictor(model, data, run, args)
    if args.output is None:
        predicting.write(sys.stdout)
        predicting.print_scores(sys.stderr)
    else:
        write_whole("output", args.output, predicting.write_file)
        predicting.print_scores(sys.stdout)
    return 0


class _Run(NamedTuple):
    """A finished run of train.py.

    Attributes:
        folder: the run's folder.
        options: the options of train.py.
        task: the task of the model.
        names: the names of the classes, if the data had names.
        columns: the names of the columns of x, if the data had names.
    """

    folder: Path
    options: argparse.Namespace
    task: Task
    names: list[str] | None
    columns: list[str] | None


def _run(args: argparse.Namespace) -> _Run:
    """Read the description of the model in a run's folder.

    Raises:
        UserError: the folder is not from train.py, or has no model.
    """
    folder = checked_path("run", args.run, "run's folder")
    for name in (OPTIONS, CONFIG, MODEL):
        if not (folder / name).is_file():
            raise UserError(
                f"run={shown(args.run)} must be the folder of a finished run of train.py: it has "
                f"no {name}"
            )
    try:
        facts = parsed(content_of(OPTIONS, folder / OPTIONS))
        if not isinstance(facts, dict) or "outputs" not in facts:
            raise UserError("it lacks 'outputs', not written by earlier versions")
        name = choice("task", facts.get("task"), TASKS)
        outputs = integer("outputs", facts["outputs"], 1)
        names, columns = (_texts(facts, key) for key in ("class_names", "x_columns"))
    except UserError as error:
        raise UserError(f"{folder / OPTIONS}: {error}") from None
    options, *_ = read([str(folder / CONFIG)])
    options.device, options.initial_model = args.device, str(folder)
    task = Task(name, outputs, outputs if name == TASKS[0] else None)
    return _Run(folder, options, task, names, columns)


def _texts(facts: dict[str, Any], key: str) -> list[str] | None:
    value = facts.get(key)
    if value is not None and not (
        isinstance(value, list) and all(isinstance(text, str) for text in value)
    ):
        raise UserError(f"{key}={shown(value)} must be a list of texts")
    return value


def _data(args: argparse.Namespace, run: _Run) -> Dataset:
    """Open the data to predict. Without targets, y is meaningless."""
    options_of_run, trained_on = run.options, run.options.data
    if args.data in BUNDLED:
        require_use("no_targets", args.no_targets, False, False, "data in files")
        options_of_run.data = args.data
        return read_data(options_of_run).test
    if trained_on in BUNDLED or Path(trained_on).suffix != Path(args.data).suffix:
        options_of_run.x = options_of_run.y = options_of_run.reader = options_of_run.format = None
    for name in ("x", "y", "reader", "format"):
        if getattr(args, name) is not None:
            setattr(options_of_run, name, getattr(args, name))
    options = reader_options(options_of_run)
    known: dict[str, Any] = {"names": run.names, "x": run.columns}
    known = {name: value for name, value in known.items() if value is not None}
    path, labels, kind = checked_path("data", args.data, "file or folder"), args.labels, None
    if not args.no_targets:
        return load_to_test(path, labels, format=options_of_run.format, known=known, **options)
    require_use("labels", labels, None, False, "targets, and --no-targets was given")
    kind = options_of_run.format or next((n for n, f in FORMATS.items() if f.matches(path)), None)
    if kind == "npz" and "y" not in npz_names(path):
        x = npz_member(path, "x")
        return Arrays(x, np.zeros(len(x), np.int64), name=str(path))
    if kind is not None and FORMATS[kind].labels:
        return load_to_test(path, path, format=kind)
    if kind in ("csv", "parquet", "arrow"):
        columns = options.get("x") or run.columns
        if not columns:
            raise UserError(
                f"no_targets=True of {path} needs --x, the columns that the model takes"
            )
        options |= {"x": columns, "y": columns[0]}
        known = {}
    return load_to_test(path, format=kind, known=known, **options)


def _model(args: argparse.Namespace, run: _Run, data: Dataset) -> tuple[TrainingModel, Dataset]:
    """Make the run's model. Return it with the data in the form used in training."""
    if not len(data):
        raise UserError(f"data={shown(args.data)} has no samples")
    standardization = read_standardization(run.folder)
    data = data if standardization is None else standardization.given(data)
    inputs = _Inputs(data)
    model = make_model(run.options, TrainingData(inputs, None, inputs, run.task))
    return model, model.given(data if not args.no_targets else inputs)


class _Inputs(Dataset):
    """The x of a data set, with zeros for y.

    Args:
        dataset: the data set to read x from.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.repeatable, self.classes = dataset, dataset.repeatable, None

    def __len__(self) -> int:
        return len(self.dataset)

    def read(
        self, indexes: Any, *, dtype: Any = np.float32, classes: int | None = None
    ) -> tuple[Any, Any]:
        x, _ = self.dataset.read(indexes, dtype=dtype)
        return x, np.zeros(len(x), np.int64)


class _Predictor:
    """Predicts all samples of a data set, by batches, in their order."""

    def __init__(
        self, model: TrainingModel, data: Dataset, run: _Run, args: argparse.Namespace
    ) -> None:
        objective: Any = model.objective
        self._objective, self._outputs = objective, _outputs(objective.model)
        self._data, self._task, self._class_names = data, run.task, run.names
        self._measures, self._probabilities = not args.no_targets, args.probabilities
        if self._probabilities and run.task.name == "regression":
            require_use("probabilities", True, False, False, "a task with classes or labels")
        self._sums: dict[str, Any] = {}

    def write_file(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            self.write(file)

    def write(self, file: TextIO) -> None:
        """Write a header and a row for each sample."""
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self._names())
        for outputs in self._batches():
            for row in self._columns(outputs):
                writer.writerow(map(str, row))
        file.flush()

    def print_scores(self, file: TextIO) -> None:
        """Print the loss and the scores of the predictions, if the data has targets."""
        if self._measures:
            scores = self._objective.scores(self._sums, len(self._data))
            predicted = ", ".join(
                f"{name.replace('_', ' ')} {score:.6g}" for name, score in scores.items()
            )
            print(f"{len(self._data)} samples, {predicted}", file=file, flush=True)

    def _batches(self) -> Iterator[Any]:
        """Yield the model's outputs for each batch. Add up the scores on the way."""
        self._sums = {}
        for begin in range(0, len(self._data), BATCH):
            indexes = np.arange(begin, min(begin + BATCH, len(self._data)))
            x, y = self._data.read(indexes, dtype=self._objective.dtype, classes=self._task.classes)
            if self._measures:
                for name, total in self._objective.sums((x, y)).items():
                    self._sums[name] = self._sums.get(name, 0) + total
            yield self._outputs(x).reshape(len(x), -1)

    def _names(self) -> list[str]:
        count, kind = self._task.outputs, self._task.name
        numbers = range(count)
        probabilities = [f"probability_{k}" for k in numbers] if self._probabilities else []
        if kind == "classification":
            return ["class", *probabilities]
        name = "value" if kind == "regression" else "label"
        return [*([name] if count == 1 else [f"{name}_{k}" for k in numbers]), *probabilities]

    def _columns(self, outputs: Any) -> Iterator[list[Any]]:
        """Yield the columns to write for each sample."""
        if self._task.name == "regression":
            yield from outputs
            return
        classes = self._task.name == "classification"
        predicted = outputs.argmax(1)[:, None] if classes else (outputs > 0).astype(np.int64)
        if classes and self._class_names is not None:
            predicted = np.array(self._class_names, object)[predicted]
        if not self._probabilities:
            yield from predicted
            return
        odds = _softmax(outputs) if classes else 0.5 * (1 + np.tanh(outputs / 2))
        for numbers, probabilities in zip(predicted, odds, strict=True):
            yield [*numbers, *probabilities]


def _softmax(outputs: Any) -> Any:
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _outputs(model: Any) -> Callable[[Any], Any]:
    """Return a function from a batch to the model's outputs, a NumPy array."""
    if isinstance(model, Model):
        return lambda x: _on_host(model.predict(x))
    from ..torch.tasks import outputs_of

    return lambda x: outputs_of(model, x)


def _on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def _parser() -> Parser:
    parser = Parser(
        prog="parallel-sgd predict",
        description="Write the predictions of a run's model as CSV: one line for each sample, in "
        "the order of the samples. If the data have targets, also print the loss and the score: "
        "on standard error, or on standard output if the predictions go to a file.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a finished run of train.py")
    add(
        "data",
        metavar="DATA",
        help=f"a file or folder, or {', '.join(BUNDLED)}, as for --data of train.py",
    )
    add("--output", metavar="FILE", help="write to this file, whole or not at all")
    add(
        "--probabilities",
        action="store_true",
        help="also write the probability of each class or label",
    )
    add("--no-targets", action="store_true", help="the data have no targets: only predict")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="the device to compute on")
    group = parser.add_argument_group(
        "data",
        "how to read DATA, as for train.py (default: the options of the run, if its data had the "
        "same kind of name)",
    )
    add = group.add_argument
    add("--labels", metavar="FILE", help="the labels, if DATA is a .npy or IDX file")
    add("--format", choices=(*FORMATS,), help="the format of DATA, if its name does not show it")
    add("--reader", nargs="+", metavar="NAME=VALUE", help="options of the format's reader")
    add("--x", nargs="+", metavar="COLUMN", help="columns of a table that the model takes")
    add("--y", nargs="+", metavar="COLUMN", help="columns of a table that are the targets")
    return parser
