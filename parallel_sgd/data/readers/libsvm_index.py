"""How many features a file in LIBSVM's format has: its largest index, found among all bytes."""

from __future__ import annotations

import numpy as np

from ..order import IndexArray
from ..validation import Array
from .text_file import BLOCK, MOST_DIGITS, TextFile


def largest_index(file: TextFile, begins: IndexArray) -> IndexArray:
    """The largest of the last indexes of some lines, int64 [1]; 0 where none has features.

    What is no index is not looked at: the line is refused when it is read.
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
        largest = max(largest, _before(part, places[places > lines]))
    return np.array([largest])


def _ends(part: Array, begins: IndexArray) -> IndexArray:
    """Where lines end, or the comments in them begin."""
    ends: IndexArray = np.append(begins[1:], len(part))
    comments = np.flatnonzero(part == ord("#"))
    if not len(comments):
        return ends
    first = comments.searchsorted(begins)
    np.minimum(ends, np.append(comments, len(part))[first], out=ends)
    return ends


def _before(part: Array, places: IndexArray) -> int:
    """The largest of the whole numbers that end before some places."""
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
