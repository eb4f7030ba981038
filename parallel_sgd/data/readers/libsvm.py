"""LIBSVM's and SVMlight's text format: a label, and the non-zero features."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Literal

import numpy as np

from ...errors import UserError
from ...validation import LARGEST_INTEGER, choice, integer, require_use, shown
from ..dataset import Dataset
from ..order import IndexArray
from ..sparse_rows import SparseRows
from ..validation import Array, DType, checked_targets, float_dtype
from ..view import CommunicatorView
from .text_file import (
    MOST_DIGITS,
    TextFile,
    finite_number,
    open_text,
    shown_token,
    split_over_ranks,
    together,
    whole_number,
)

Target = Literal["class", "value", "labels"]
TARGETS: tuple[Target, ...] = ("class", "value", "labels")
QUERY = b"qid:"


class LibSVM(Dataset):
    """The samples of a file in LIBSVM's format; made by `load_libsvm`.

    Attributes:
        features: the width of x.
    """

    repeatable = True

    def __init__(
        self,
        file: TextFile,
        begins: IndexArray,
        features: int,
        *,
        zero_based: bool,
        target: Target,
        classes: int | Sequence[int] | None,
    ) -> None:
        self.features = features
        self._file, self._begins, self._base = file, begins, 0 if zero_based else 1
        self._target: Target = target
        self._count = classes if isinstance(classes, int | None) else len(classes)
        listed = () if isinstance(classes, int | None) else classes
        self._place = {label: place for place, label in enumerate(listed)}
        self.classes = self._count if target == "class" else None
        self.y_name = f"{file.name}: y"

    def __len__(self) -> int:
        return len(self._begins)

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        rows, y = self.read_sparse(indexes, dtype=dtype, classes=classes)
        return rows.dense(), y

    def read_sparse(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[SparseRows, Array]:
        """Read samples as `read` does, with x as `SparseRows`. Local."""
        kind = float_dtype(dtype) or np.dtype(np.float64)
        self._file.require_unchanged()
        records = [self._record(int(index), kind) for index in indexes]
        shape = len(records), self.features
        begins = np.cumsum([0, *(len(columns) for _, columns, _ in records)])
        columns = np.concatenate([np.empty(0, np.int64), *(c for _, c, _ in records)])
        values = np.concatenate([np.empty(0, kind), *(v for _, _, v in records)], dtype=kind)
        y = self._targets([labels for labels, _, _ in records])
        return (
            SparseRows(begins, columns, values, shape),
            checked_targets(self.y_name, y, indexes, kind, classes),
        )

    def targets(self, indexes: Array) -> Array:
        self._file.require_unchanged()
        labels = [self._labels(int(index), self._split(int(index))[0]) for index in indexes]
        return self._targets(labels)

    def query_ids(self, indexes: Array) -> IndexArray:
        """Return the query number after "qid:" of each sample, int64 [m], for ranking. Local.

        Raises:
            UserError: a sample has no query number.
        """
        self._file.require_unchanged()
        found = np.empty(len(indexes), np.int64)
        for row, index in enumerate(indexes):
            _, query, _ = self._split(int(index))
            if query is None:
                raise self._error_at(int(index), "has no qid: after its label")
            found[row] = query
        return found

    def _split(self, index: int) -> tuple[bytes, int | None, list[bytes]]:
        """Split a line into label, query number (or None), and unparsed features."""
        line, _, _ = self._file.line(int(self._begins[index])).partition(b"#")
        if b"_" in line:  # Python accepts "_" in numbers
            raise self._error_at(index, 'must hold numbers only: it has "_"')
        tokens = line.split()
        label = b""
        if tokens and b":" not in tokens[0]:
            label = tokens.pop(0)
        elif self._target != "labels":
            first = shown_token(tokens[0]) if tokens else "nothing"
            raise self._error_at(index, f"must begin with a label: it begins with {first}")
        if not (tokens and tokens[0].startswith(QUERY)):
            return label, None, tokens
        try:
            return label, whole_number(tokens[0].removeprefix(QUERY)), tokens[1:]
        except ValueError:
            problem = f"{shown_token(tokens[0])} must be qid: and a whole number"
            raise self._error_at(index, problem) from None

    def _record(self, index: int, kind: np.dtype[Any]) -> tuple[list[float], IndexArray, Array]:
        """Parse and check a sample: labels, columns and values."""
        label, _, pairs = self._split(index)
        parts = [*map(bytes.partition, pairs, repeat(b":"))]
        names, _, exacts = zip(*parts, strict=True) if parts else ((),) * 3
        try:
            numbers = np.array([*map(int, names)], np.int64)
            exact = np.array([*map(float, exacts)], np.float64)
        except (ValueError, OverflowError):
            raise self._error_at(index, _bad_pair(pairs)) from None
        columns = numbers - self._base
        if len(columns):
            back = np.diff(columns) <= 0
            if back.any():
                last, here = numbers[back.argmax()], numbers[back.argmax() + 1]
                raise self._error_at(
                    index, f"index {here} follows {last}: must be in ascending order"
                )
            bad = (columns < 0) | (columns >= self.features)
            if bad.any():
                raise self._error_at(
                    index,
                    f"index {numbers[bad.argmax()]} is out of range: must be from {self._base} to "
                    f"{self.features - 1 + self._base}{self._hint(columns)}",
                )
        with np.errstate(over="ignore"):
            values = exact.astype(kind)
        if not np.isfinite(values).all():
            pair = shown_token(pairs[int((~np.isfinite(values)).argmax())])
            raise self._error_at(index, f"{pair} must be a finite number, in {kind}")
        return self._labels(index, label), columns, values

    def _hint(self, columns: IndexArray) -> str:
        if self._base and (columns < 0).any():
            return " (zero_based=True is for files whose indexes begin at 0)"
        return ""

    def _labels(self, index: int, label: bytes) -> list[float]:
        """Return the labels of a sample as numbers: indexes in `classes` if these are listed."""
        required = "a whole number"
        try:
            if self._target == "value":
                required = "a finite number"
                return [finite_number(label)]
            tokens = [label]
            if self._target == "labels":
                required = "whole numbers separated by commas"
                tokens = label.split(b",") if label else []
            labels = [whole_number(token) for token in tokens]
        except ValueError:
            raise self._error_at(index, f"label {shown_token(label)} must be {required}") from None
        return [self._label_number(index, one) for one in labels]

    def _label_number(self, index: int, label: int) -> int:
        if self._place:
            if label not in self._place:
                known = shown(list(self._place))
                raise self._error_at(index, f"label {label} must be one of classes={known}")
            return self._place[label]
        if self._count is not None and not 0 <= label < self._count:
            raise self._error_at(index, f"label {label} must be from 0 to {self._count - 1}")
        return label

    def _targets(self, labels: list[list[float]]) -> Array:
        if self._target == "labels":
            hot = np.zeros((len(labels), self._count or 0), np.int64)
            for row, theirs in zip(hot, labels, strict=True):
                row[np.array(theirs, np.int64)] = 1
            return hot
        stored = np.array(labels, np.float64 if self._target == "value" else np.int64)
        return stored.reshape(len(labels))

    def _error_at(self, index: int, problem: str) -> UserError:
        return self._file.error_at(int(self._begins[index]), problem)

    def __repr__(self) -> str:
        return f"LibSVM({self._file.name}: {len(self)} samples of {self.features} features)"


def load_libsvm(
    path: str | os.PathLike[str],
    *,
    features: int | None = None,
    zero_based: bool = False,
    target: Target = "class",
    classes: int | Sequence[int] | None = None,
    comm: CommunicatorView | None = None,
) -> LibSVM:
    """Open a file in LIBSVM's or SVMlight's format: a sample a line, ``label index:value …``.

    Indexes ascend in a line; features not listed are 0. Text after a "#" is a comment, and "qid:7"
    may follow the label (`LibSVM.query_ids`). A line is parsed when it is read, and errors in the
    line are raised then, with its number.

    Args:
        path: of the file.
        features: the width of x, at least 1. None: the largest index in the file, found by a pass
            over all lines now. (A test set may lack the last features: give the number there.)
        zero_based: True if indexes begin at 0, not at 1.
        target: meaning of labels. "class": a whole number, y int64 [m]. "value": a number, y float
            [m]. "labels": several whole numbers or none, as 1,3,7: y int64 [m, labels] of 0 and 1.
        classes: the number of labels, from 0 on; or the list of labels, as ``[-1, 1]``: y is then
            the index in this list. None: "class" takes whole numbers as given. Required for
            "labels".
        comm: each rank indexes its part of the file, and all ranks get the whole index; None: this
            rank indexes the whole file.
    Returns:
        The data set: x float [m, features], dense in `read`, or `SparseRows` in `read_sparse`.
    Raises:
        UserError: an argument is not as required, or the file cannot be read or holds no samples; a
            SharedError on all ranks of `comm`.

    Local; with `comm` collective. Cost: one or two passes over the bytes; memory: 8 bytes a sample.
    """
    file = open_text(path, comm)

    def checked() -> tuple[Target, int | Sequence[int] | None]:
        choice("zero_based", zero_based, (True, False))
        if features is not None:
            integer("features", features, 1)
        one: Target = choice("target", target, TARGETS)
        require_use("classes", classes, None, one != "value", "target='class' or 'labels'")
        if one == "labels" and classes is None:
            raise UserError("classes must be given with target='labels': it is the width of y")
        return one, _checked_classes(classes)

    kind, labels = together(checked, comm)
    begins = file.without_blank(file.line_begins(comm), b"#")
    if not len(begins):
        raise UserError(f"{file.name} holds no samples")
    width = features
    if width is None:
        largest = split_over_ranks(lambda b, e: largest_index(file, begins[b:e]), len(begins), comm)
        width = int(largest.max()) + zero_based
        if not width:
            raise UserError(f"{file.name} names no features to count: give the number of features")
    return LibSVM(file, begins, width, zero_based=zero_based, target=kind, classes=labels)


def _bad_pair(pairs: list[bytes]) -> str:
    """Describe the problem of the first malformed pair."""
    for pair in pairs:
        name, _, value = pair.partition(b":")
        try:
            _, _ = np.int64(int(name)), float(value)
        except (ValueError, OverflowError):
            return f"{shown_token(pair)} must be index:value"
    raise AssertionError("all pairs are numbers")


def _checked_classes(classes: Any) -> int | tuple[int, ...] | None:
    if classes is None:
        return None
    if isinstance(classes, Sequence | np.ndarray) and not isinstance(classes, str | bytes):
        listed = tuple(integer("classes", one, -LARGEST_INTEGER) for one in classes)
        if not listed or len(set(listed)) < len(listed):
            raise UserError(f"classes={shown(classes)} must be labels without repeats")
        return listed
    return integer("classes", classes, 1)


def largest_index(file: TextFile, begins: IndexArray) -> IndexArray:
    """Return the largest of the last indexes in some lines, int64 [1]; 0 if no line has features.

    Malformed lines are ignored here, and refused when they are read.
    """
    largest, first = 0, 0
    while first < len(begins):
        after = int(begins.searchsorted(begins[first] + file.block, side="right"))
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
