"""Read the data of train.py, and split the data for training, validation and testing."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from ...communication import Communicator
from ...data import (
    DIGITS_CLASSES,
    Dataset,
    Dense,
    Sparse,
    Standardization,
    Task,
    digits,
    library_source,
    load_train_test,
    read_standardization,
    task_of,
)
from ...errors import UserError
from ...validation import line_of, shown

#: Data that need no file: the number of classes, and the function to read the data.
BUNDLED: dict[str, tuple[int, Callable[..., tuple[Dataset, Dataset]]]] = {
    "digits": (DIGITS_CLASSES, digits),
    "library": (256, library_source),
}


#: CNTK's streams, allowed in a reader's options in addition to numbers, texts, lists and tables.
STREAMS = {"Dense": Dense, "Sparse": Sparse}

#: Arguments of a reader that train.py sets itself.
RESERVED = ("path", "labels", "format", "test", "seed", "say")


class TrainingData(NamedTuple):
    """The data of a training run.

    Attributes:
        train: the samples to train on.
        validation: the samples to measure the model on in the course of training; None: `test`.
        test: the samples to test on.
        task: the task to learn.
        sources: a line about the files in use; "" if there are none.
        standardization: the mean and scale of standardized features, if any.
    """

    train: Dataset
    validation: Dataset | None
    test: Dataset
    task: Task
    sources: str = ""
    standardization: Standardization | None = None


def read_data(options: argparse.Namespace) -> TrainingData:
    """Read the data named by the options.

    Raises:
        UserError: the data cannot be read, or an option does not fit them.

    Local.
    """
    train, test, task, sources = _read(options)
    if not options.validation:
        return TrainingData(train, None, test, task, sources)
    if not 0 < round(options.validation * len(train)) < len(train):
        raise UserError(
            f"validation={shown(options.validation)} must leave at least one of {len(train)} "
            "training samples on either side"
        )
    train, validation = train.split(options.validation, seed=options.seed)
    return TrainingData(train, validation, test, task, sources)


def standardized(
    data: TrainingData, options: argparse.Namespace, run: str | None, comm: Communicator
) -> TrainingData:
    """Return the data with standardized features, if requested.

    A resumed run, or the run of the initial model, decides whether its own mean and scale are used.

    Args:
        data: the data as read.
        options: the options of train.py.
        run: the folder of the resumed run; None for a new run.
        comm: the ranks.

    Raises:
        SharedError: --standardize does not fit that run, or the data cannot be standardized.

    Collective. Cost: a pass over the training data, if mean and scale are not known yet.
    """
    before = run or options.initial_model

    def earlier() -> Standardization | None:
        found = None if before is None else read_standardization(before)
        if before is not None and found is None and options.standardize:
            option = "resume" if run else "initial_model"
            raise UserError(
                f"standardize=True: the model of {option}={shown(str(before))} was trained on "
                "features as they are"
            )
        return found

    found = comm.together(earlier)
    if found is None:
        if not options.standardize:
            return data
        found = Standardization.of(data.train, comm)
    standardization = found

    def given() -> TrainingData:
        validation = data.validation and standardization.given(data.validation)
        return data._replace(
            train=standardization.given(data.train),
            validation=validation,
            test=standardization.given(data.test),
            standardization=standardization,
        )

    return comm.together(given)


def data_facts(dataset: Dataset) -> dict[str, list[str] | None]:
    """Return the facts that further data must share to have the same meaning. Local.

    Returns:
        The names of the classes by label, and of the columns of x; None if there are none.
    """
    while hasattr(dataset, "dataset"):  # a part, or a view changed on reading
        dataset = dataset.dataset
    found = {name: getattr(dataset, name, None) for name in ("names", "x_columns")}
    return {
        "class_names": None if found["names"] is None else [*found["names"]],
        "x_columns": None if found["x_columns"] is None else [*found["x_columns"]],
    }


def require_data_options(options: argparse.Namespace) -> None:
    """Raise a UserError for options that do not fit the kind of data, before reading any. Local."""
    if not 0 <= options.validation < 1:
        raise UserError(
            f"validation={shown(options.validation)} must be a fraction, at least 0 and below 1"
        )
    if options.data in BUNDLED:
        for name in ("labels", "format", "reader", "x", "y", "task"):
            if (value := getattr(options, name)) is not None:
                raise UserError(f"{name}={shown(value)}: {options.data} has {name} of its own")
    reader_options(options)


def _read(options: argparse.Namespace) -> tuple[Dataset, Dataset, Task, str]:
    if options.data in BUNDLED:
        classes, read_bundled = BUNDLED[options.data]
        train, test = read_bundled(test=options.test, seed=options.seed)
        classes = options.classes or classes
        return train, test, Task("classification", classes, classes), ""
    sources: list[str] = []
    train, test = load_train_test(
        options.data,
        options.labels,
        format=options.format,
        test=options.test,
        seed=options.seed,
        say=sources.append,
        **reader_options(options),
    )
    task = task_of(train, options.task, options.classes)
    return train, test, task, f"{task.name}, {'; '.join(sources)}"


def reader_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options for a format's reader: --x, --y and the parsed texts of --reader.

    Examples of texts: ``size=[32, 32]``, ``streams={"x": Dense(3), "y": Sparse(2, one_hot=True)}``.
    """
    columns = {"x": args.x, "y": args.y}
    options: dict[str, Any] = {name: given for name, given in columns.items() if given}
    if args.y and len(args.y) == 1:
        (options["y"],) = args.y
    for text in args.reader or []:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"reader={shown(text)} must be NAME=VALUE, as size=[32,32]")
        if name in RESERVED:
            flag = "--data" if name == "path" else f"--{name}"
            raise UserError(f"reader={shown(text)}: {name} is no option of a reader, see {flag}")
        if columns.get(name):
            raise UserError(f"reader={shown(text)}: --{name} gives the same already")
        try:
            options[name] = _value(ast.parse(value, mode="eval").body)
        except TypeError as error:  # from a stream's arguments
            raise UserError(f"reader={shown(text)}: {line_of(error)}") from None
        except (ValueError, SyntaxError) as error:  # a plain text needs no quotes
            if isinstance(error, UserError):
                raise
            options[name] = value
    return options


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, possibly with streams inside.

    Raise a ValueError for the rest.
    """
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in STREAMS:
        named = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in node.keywords}
        return STREAMS[node.func.id](*map(ast.literal_eval, node.args), **named)
    return ast.literal_eval(node)
