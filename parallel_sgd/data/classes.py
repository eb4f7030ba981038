"""How many classes there are, where the labels must tell."""

from __future__ import annotations

import numpy as np

from ..errors import UserError
from ..validation import LARGEST_INTEGER, integer
from .dataset import Dataset, require_dataset
from .validation import checked_labels, place_name

BATCH = 1 << 20  #: labels' rows that are looked at together


def count_classes(data: Dataset, classes: int | None = None) -> int:
    """Check all labels, and return the number of classes.

    Args:
        data: its labels are read part by part, its inputs only where they cannot be read without
            (`Dataset.targets`). Not read at all where the format says how many classes there are.
        classes: how many there are; None: as the format says, or one more than the largest label.
    Returns:
        `classes` where it was given.
    Raises:
        UserError: a label is not an integer or out of range; or there would be more classes than
            samples, as a stray label makes them, which must be asked for.

    Local. One pass over the labels.
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
