"""The number of classes, counted from the labels where the format does not say."""

from __future__ import annotations

import numpy as np

from ..errors import UserError
from ..validation import LARGEST_INTEGER, integer
from .dataset import Dataset, require_dataset
from .validation import checked_labels, place_name

BATCH = 1 << 20  #: rows of labels read at a time


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
        raise UserError(f"{data.y_name} holds no labels to tell the number of classes: give it")
    if largest >= len(data):
        raise UserError(
            f"{data.y_name}{where} = {largest} would make {largest + 1} classes of {len(data)} "
            f"samples: give --classes {largest + 1} if it is meant"
        )
    return largest + 1
