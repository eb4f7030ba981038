"""The data of train.py: read, and cut into what is trained, validated and tested on."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from ..data import (
    DIGITS_CLASSES,
    Dataset,
    Task,
    digits,
    library_source,
    load_train_test,
    task_of,
)
from ..errors import UserError
from ..validation import shown

#: Data that need no file: the number of classes, and who reads them.
BUNDLED: dict[str, tuple[int, Callable[..., tuple[Dataset, Dataset]]]] = {
    "digits": (DIGITS_CLASSES, digits),
    "library": (256, library_source),
}


class TrainingData(NamedTuple):
    """What is trained on, measured in the course of training (None: what is tested on), and tested
    on; and what is to be learned of it."""

    train: Dataset
    validation: Dataset | None
    test: Dataset
    task: Task


def read_data(options: argparse.Namespace) -> TrainingData:
    """The data that the options ask for.

    Raises:
        UserError: they cannot be had, or an option does not fit them.

    Local.
    """
    train, test, task = _read(options)
    if not options.validation:
        return TrainingData(train, None, test, task)
    train, validation = train.split(options.validation, seed=options.seed)
    return TrainingData(train, validation, test, task)


def require_data_options(options: argparse.Namespace) -> None:
    """Refuse options that do not fit the kind of data, before any are read. Local."""
    if not 0 <= options.validation < 1:
        raise UserError(
            f"validation={shown(options.validation)} must be a fraction, at least 0 and below 1"
        )
    if options.data in BUNDLED:
        for name in ("labels", "format", "reader", "task"):
            if (value := getattr(options, name)) is not None:
                raise UserError(f"{name}={shown(value)}: {options.data} has {name} of its own")
    _reader_options(options.reader or [])


def _read(options: argparse.Namespace) -> tuple[Dataset, Dataset, Task]:
    if options.data in BUNDLED:
        classes, read_bundled = BUNDLED[options.data]
        train, test = read_bundled(test=options.test, seed=options.seed)
        classes = options.classes or classes
        return train, test, Task("classification", classes, classes)
    train, test = load_train_test(
        options.data,
        options.labels,
        format=options.format,
        test=options.test,
        seed=options.seed,
        **_reader_options(options.reader or []),
    )
    return train, test, task_of(train, options.task, options.classes)


def _reader_options(given: list[str]) -> dict[str, Any]:
    """The options of a format's reader, from texts as ``size=[32, 32]`` and ``y=price``."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"reader={shown(text)} must be NAME=VALUE, as size=[32,32]")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a plain text needs no quotes
            options[name] = value
    return options
