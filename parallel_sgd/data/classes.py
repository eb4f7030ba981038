"""How many classes there are, where the labels must tell."""

from __future__ import annotations

import numpy as np

from ..errors import UserError
from ..validation import LARGEST_INTEGER, integer
from .dataset import Arrays
from .validation import checked_labels, place_name

BATCH = 1 << 20  #: labels' rows that are looked at together


def count_classes(data: Arrays, classes: int | None = None) -> int:
    """Check all labels, and return the number of classes.

    Args:
        data: its labels are read part by part, its inputs not at all.
        classes: how many there are; None: one more than the largest label.
    Returns:
        `classes` where it was given.
    Raises:
        UserError: a label is not an integer or out of range; or there would be more classes than
            samples, as a stray label makes them, which must be asked for.

    Local. One pass over the labels.
    """
    if classes is not None:
        classes = integer("classes", classes, 1)
    largest, where = -1, ""
    for begin in range(0, len(data), BATCH):
        data.require_whole()
        stored = np.asarray(data.y[begin : begin + BATCH])
        indexes = np.arange(begin, begin + len(stored))
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
