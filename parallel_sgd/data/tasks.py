"""Learning tasks (classification, regression, several labels), and the number of classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import UserError
from ..validation import LARGEST_INTEGER, choice, integer, require_use
from .dataset import Dataset, require_dataset
from .validation import checked_labels, place_name

TASKS = ("classification", "regression", "multi-label")
BATCH = 1 << 20  #: rows of labels read at a time


@dataclass(frozen=True)
class Task:
    """The requirements of a data set's y on a model.

    Attributes:
        name: one of `TASKS`.
        outputs: number of the model's outputs: classes, numbers, or labels.
        classes: for `Dataset.read` and the sources; None unless y holds labels of classes.
    """

    name: str
    outputs: int
    classes: int | None


def task_of(data: Dataset, task: str | None = None, classes: int | None = None) -> Task:
    """Determine the learning task of a data set.

    Args:
        data: at least one sample. Counting classes takes a pass over y (`count_classes`); otherwise
            only the first sample is read.
        task: one of `TASKS`. None: inferred from y. Whole numbers [n] are classes, whole numbers
            [n, k] several labels, floats numbers.
        classes: number of classes for classification; None: counted from the labels.
    Returns:
        The task. For classification y is whole numbers of shape [n]; else [n] or [n, outputs].
    Raises:
        UserError: an argument is not as required, there are no samples, or y is not as the task
            requires. For several labels, values other than 0 and 1 are refused only in training.

    Local.

    >>> from .dataset import Arrays
    >>> task_of(Arrays(np.zeros((9, 4)), np.arange(9) % 3))
    Task(name='classification', outputs=3, classes=3)
    >>> task_of(Arrays(np.zeros((9, 4)), np.zeros((9, 2))))
    Task(name='regression', outputs=2, classes=None)
    """
    require_dataset("data", data)
    if task is not None:
        task = choice("task", task, TASKS)
    if not len(data):
        raise UserError(f"{data!r} has no samples to infer the task of")
    _, y = data.read(np.zeros(1, np.int64), dtype=None)
    whole, shape = y.dtype.kind in "iu", y.shape[1:]
    if task is None:
        task = "regression" if not whole else "multi-label" if shape else "classification"
    kind = "whole numbers" if whole else "floats"
    has = f"{data.y_name} has {kind} [{', '.join(map(str, ('n', *shape)))}]"
    if task == "classification":
        if not whole or shape:
            raise UserError(f"{has}: task={task!r} needs labels [n], whole numbers")
        classes = count_classes(data, classes)
        return Task(task, classes, classes)
    require_use("classes", classes, None, False, "task='classification'")
    if len(shape) > 1 or 0 in shape:
        raise UserError(f"{has}: task={task!r} needs y [n] or [n, k]")
    return Task(task, math.prod(shape), None)


def count_classes(data: Dataset, classes: int | None = None) -> int:
    """Check all labels, and return the number of classes.

    Args:
        data: only labels are read, part by part, if the format can read y without x
            (`Dataset.targets`). Nothing is read if the format declares its number of classes.
        classes: the number of classes. None: as declared by the format, or else the largest label
            plus 1.
    Returns:
        The number of classes: `classes` if given.
    Raises:
        UserError: a label is not an integer, or is out of range. Also raised if there would be more
            classes than samples, as a stray label makes them: the user must then confirm by
                `classes`.

    Local. Cost: one pass over the labels.
    """
    require_dataset("data", data)
    if classes is not None:
        classes = integer("classes", classes, 1)
    if data.classes is not None:
        if classes is not None and classes < data.classes:
            raise UserError(f"classes={classes} must be at least the {data.classes} of {data!r}")
        return classes or data.classes
    largest, where = -1, ""
    for begin in range(0, len(data), BATCH):
        indexes = np.arange(begin, min(begin + BATCH, len(data)))
        stored = data.targets(indexes)
        y = checked_labels(data.y_name, stored, indexes, classes or LARGEST_INTEGER)
        if y.size and y.max() > largest:
            place = np.unravel_index(int(y.argmax()), y.shape)
            largest, where = int(y[place]), place_name(indexes, place)
    if classes is not None:
        return classes
    if largest < 0:
        raise UserError(
            f"{data.y_name} holds no labels to count classes of: give the number of classes"
        )
    if largest >= len(data):
        raise UserError(
            f"{data.y_name}{where} = {largest} would make {largest + 1} classes of {len(data)} "
            f"samples: give --classes {largest + 1} if that is right"
        )
    return largest + 1
