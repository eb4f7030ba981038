"""The number of features of a file in LIBSVM's format: the largest index, found in all bytes."""

from __future__ import annotations

import numpy as np

from ..order import IndexArray
from ..validation import Array
from .text_file import BLOCK, MOST_DIGITS, TextFile


def largest_index(file: TextFile, begins: IndexArray) -> IndexArray:
    """Return the largest of the last indexes in some lines, int64 [1]; 0 if no line has features.

    Malformed lines are ignored here, and refused when they are read.
    """
    largest, first = 0, 0
    while first < len(begins):
        after = int(begins.searchsorted(begins[first] + BLOCK, side="right"))
        lines, first = begins[first:after], after
        last_line = int(lines[-1])
        end = last_line + len(file.line(last_line))
        file.require_unchanged()
        part, lines = file.bytes[int(lines[0]) : end], lines - lines[0]
        ends = _ends(part, lines)
        colons = np.flatnonzero(part == ord(":"))
        last = colons.searchsorted(ends) - 1
        here = last >= 0
        places, lines = colons[last[here]], lines[here]
        largest = max(largest, _largest_before(part, places[places > lines]))
    return np.array([largest])


def _ends(part: Array, begins: IndexArray) -> IndexArray:
    """Return the end of each line, or the beginning of its comment."""
    ends: IndexArray = np.append(begins[1:], len(part))
    comments = np.flatnonzero(part == ord("#"))
    if not len(comments):
        return ends
    first = comments.searchsorted(begins)
    np.minimum(ends, np.append(comments, len(part))[first], out=ends)
    return ends


def _largest_before(part: Array, places: IndexArray) -> int:
    """Return the largest of the whole numbers that end just before the given places."""
    values, scale = np.zeros(len(places), np.int64), 1
    for _ in range(MOST_DIGITS):
        places = places - 1
        digit = part[np.maximum(places, 0)] - np.uint8(ord("0"))
        going_on = (digit <= 9) & (places >= 0)
        if not going_on.any():
            break
        values[going_on] += digit[going_on].astype(np.int64) * scale
        places, scale = np.where(going_on, places, 0), 10 * scale
    return int(values.max(initial=0))
