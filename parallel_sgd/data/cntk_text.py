"""CNTK's text format: samples of several streams a line, and sequences of several lines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import UserError
from .cntk_streams import Sample, Stream, alias_of, checked_streams
from .dataset import Dataset
from .order import IndexArray
from .sequences import Padded, Sequences, filled_up
from .text_file import (
    BLOCK,
    LARGEST_SPACE,
    MOST_DIGITS,
    TextFile,
    by_ranks,
    opened_text,
    shown_token,
    together,
)
from .validation import Array, DType, checked_labels, float_dtype
from .view import CommunicatorView

COMMENT = b"|#"
Streams = Mapping[str, Stream | None]


class _File:
    """The sequences of a CNTK text file by their place.

    Args:
        streams: all that may be in the file, None for those to skip.
        comm: see `load_cntk_text`.
    Raises:
        UserError: see there.

    Attributes:
        begins: int64 [sequences + 1], where each begins, and the last one ends.

    Collective over `comm`. Cost: one pass over the bytes, and 8 bytes a sequence.
    """

    def __init__(
        self, path: str | os.PathLike[str], streams: Streams, comm: CommunicatorView | None
    ) -> None:
        self.file = opened_text(path, comm)
        given = together(lambda: checked_streams(streams), comm)
        self.streams = {name: stream for name, stream in given.items() if stream is not None}
        self._names = {alias_of(n, s): n if s else None for n, s in given.items()}
        self.x, *_, self.y = self.streams
        lines = self.file.without_blank(self.file.line_begins(comm), COMMENT)
        if not len(lines):
            raise UserError(f"{self.file.name} holds no samples")
        ids, digits = self.file.numbers_at(lines[:1], self.file.size)
        self._has_ids = bool(digits[0])
        if self._has_ids:
            ids = by_ranks(lambda b, e: _line_ids(self.file, lines[b:e]), len(lines), comm)
            latest = np.maximum.accumulate(np.where(ids >= 0, np.arange(len(ids)), 0))
            lines = lines[np.diff(ids[latest], prepend=-1) != 0]
        self.begins = np.append(lines, self.file.size)

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __repr__(self) -> str:
        return f"{self.file.name}: {len(self)} sequences of {', '.join(self.streams)}"

    def read(
        self, indexes: Array, kind: np.dtype[Any], single: bool, only: str | None = None
    ) -> dict[str, tuple[Array, IndexArray]]:
        """Read sequences.

        Args:
            single: whether each must have one sample of each stream.
            only: the stream whose values are parsed; None: all.
        Returns:
            By stream, the samples of all, one after the other, and how many each has.
        """
        found: dict[str, list[Sample]] = {name: [] for name in self.streams}
        lengths = {name: np.zeros(len(indexes), np.int64) for name in self.streams}
        for row, index in enumerate(indexes):
            for name, samples in self._samples(int(index), single).items():
                found[name] += samples
                lengths[name][row] = len(samples)
        return {
            name: (stream.read(found[name], kind, self.file), lengths[name])
            for name, stream in self.streams.items()
            if only in (None, name)
        }

    def _samples(self, index: int, single: bool) -> dict[str, list[Sample]]:
        """The samples of a sequence by stream."""
        self.file.require_whole()
        begin, end = (int(self.begins[place]) for place in (index, index + 1))
        found: dict[str, list[Sample]] = {name: [] for name in self.streams}
        at = begin
        for line in self.file.pages[begin:end].split(b"\n"):
            for name, sample in self._of_line(line, at):
                one = single or self.streams[name].per_sequence
                if found[name] and (one or found[name][-1].line == at):
                    raise self.file.wrong(at, self._twice(name, single, one))
                found[name].append(sample)
            at += len(line) + 1
        missing = [name for name, samples in found.items() if not samples]
        if missing:
            raise self.missing(begin, missing[0])
        return found

    def _of_line(self, line: bytes, at: int) -> list[tuple[str, Sample]]:
        """The samples of a line, each with the name of its stream; comments are left out."""
        head, *fields = line.split(b"|")
        head = head.rstrip()  # where spaces precede an id, the index has not seen it
        if head and not (self._has_ids and head.isdigit()):
            if head.isdigit():
                problem = f"has the sequence id {shown_token(head)}, but the first line has none"
                raise self.file.wrong(at, problem)
            required = 'must begin with a sequence id or "|"'
            raise self.file.wrong(at, f"{required}: it begins with {shown_token(head)}")
        samples = []
        for field in fields:
            if field.startswith(b"#"):
                continue
            name, *values = field.split(None, 1)[:2] or [b""]
            if not name or not field.startswith(name):
                raise self.file.wrong(at, 'the name of a stream must follow "|"')
            if name not in self._names:
                raise self.file.wrong(at, self._unknown(name))
            known = self._names[name]
            if known is not None:
                samples.append((known, Sample(values[0] if values else b"", at)))
        return samples

    def missing(self, begin: int, name: str) -> UserError:
        return self.file.wrong(begin, f"the sequence has no sample of {name!r}")

    def _unknown(self, name: bytes) -> str:
        known = ", ".join(alias.decode() for alias in self._names)
        return f"stream {shown_token(name)} is none of {known} (None as a stream skips it)"

    def _twice(self, name: str, single: bool, one: bool) -> str:
        if not one:
            return f"a line has two samples of {name!r}"
        hint = " (load_cntk_sequences reads sequences)" if single else ""
        return f"the sequence has a second sample of {name!r}{hint}"

    def samples_of_x(self, begin: int, end: int) -> IndexArray:
        """How many samples of x each sequence of a range has. One pass over their bytes."""
        alias = alias_of(self.x, self.streams[self.x])
        counts, first = [np.empty(0, np.int64)], begin
        while first < end:
            most = self.begins[first] + BLOCK
            after = min(max(int(self.begins.searchsorted(most)), first + 1), end)
            bounds = self.begins[first : after + 1]
            self.file.require_whole()
            part = self.file.bytes[bounds[0] : bounds[-1]]
            places = np.flatnonzero(part == ord("|")) + 1
            for character in alias:
                places = places[places < len(part)]
                places = places[part[places] == character] + 1
            following = np.append(part, np.uint8(ord("\n")))[places]
            places = places[(following <= LARGEST_SPACE) | (following == ord("|"))]
            counts.append(np.diff(places.searchsorted(bounds - bounds[0], side="right")))
            first = after
        found = np.concatenate(counts)
        if not found.all():
            raise self.missing(int(self.begins[begin + found.argmin()]), self.x)
        return found


class CNTKSamples(Dataset):
    """The sequences of a CNTK text file, of one sample each; see `load_cntk_text`."""

    repeatable = True

    def __init__(self, file: _File) -> None:
        self._file = file
        self.y_name = f"{file.file.name}: y"
        y = file.streams[file.y]
        self.classes = y.dimension if y.one_hot else None

    def __len__(self) -> int:
        return len(self._file)

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        streams = self.read_streams(indexes, dtype=dtype)
        y = streams[self._file.y]
        if classes is not None:
            y = checked_labels(self.y_name, y, indexes, classes)
        return streams[self._file.x], y

    def targets(self, indexes: Array) -> Array:
        name, kind = self._file.y, np.dtype(np.float64)
        return self._file.read(indexes, kind, single=True, only=name)[name][0]

    def read_streams(self, indexes: Array, *, dtype: DType = np.float32) -> dict[str, Array]:
        """Read all streams of some samples by name: float [m, dimension], or int64 [m] where they
        are `one_hot`. Local."""
        kind = float_dtype(dtype) or np.dtype(np.float64)
        read = self._file.read(indexes, kind, single=True)
        return {name: values for name, (values, _) in read.items()}

    def __repr__(self) -> str:
        return f"CNTKSamples({self._file!r})"


class CNTKSequences(Sequences):
    """The sequences of a CNTK text file; see `load_cntk_sequences`."""

    def __init__(self, file: _File, lengths: IndexArray) -> None:
        self._file, self.lengths = file, lengths

    def read(
        self,
        indexes: Array,
        *,
        dtype: DType = np.float32,
        classes: int | None = None,
        y_fill: int = 0,
    ) -> tuple[Padded, Padded | Array]:
        streams = self.read_streams(indexes, dtype=dtype, y_fill=y_fill, classes=classes)
        x = streams[self._file.x]
        assert isinstance(x, Padded)
        if not (x.lengths == self.lengths[indexes]).all():
            raise UserError(f"{self._file.file.name} has changed while it is read")
        return x, streams[self._file.y]

    def read_streams(
        self,
        indexes: Array,
        *,
        dtype: DType = np.float32,
        classes: int | None = None,
        y_fill: int = 0,
    ) -> dict[str, Padded | Array]:
        """Read all streams of some sequences by name, each padded to a length of its own; those
        `per_sequence` are arrays [m, …]. Arguments as for `read`. Local."""
        kind = float_dtype(dtype) or np.dtype(np.float64)
        streams: dict[str, Padded | Array] = {}
        for name, (values, lengths) in self._file.read(indexes, kind, single=False).items():
            if name == self._file.y and classes is not None:
                within = np.repeat(indexes, lengths)
                checked_labels(f"{self._file.file.name}: y", values, within, classes)
            fill = y_fill if name == self._file.y else 0
            whole = self._file.streams[name].per_sequence
            streams[name] = values if whole else filled_up(values, lengths, fill)
        return streams

    def __repr__(self) -> str:
        return f"CNTKSequences({self._file!r}, {self.lengths.sum()} tokens)"


def load_cntk_text(
    path: str | os.PathLike[str], streams: Streams, *, comm: CommunicatorView | None = None
) -> CNTKSamples:
    """Open a file in CNTK's text format, each sequence of which is one sample of each stream.

    A line is ``[sequence id] |name values |name values |# comment``, with spaces or tabs. Lines
    that follow each other with the same id, or with none after a line that has one, are one
    sequence; without any ids, each line is. Blank lines count for nothing. A comment ends at the
    next "|" that is not "|#". A line is parsed when it is asked for, and an error in it names it.

    Args:
        streams: by name: `Dense` or `Sparse` with their dimension, or None for one to skip. The
            first is x, the last y.
        comm: each of its ranks looks through its part of the file, and all get the whole index;
            None: this rank does alone.
    Returns:
        The data set: x and y are float [m, dimension], or int64 [m] where they are `one_hot`.
    Raises:
        UserError: an argument is not as required, or the file cannot be read or holds no samples; a
            SharedError on all ranks of `comm`.

    Local; with `comm` collective. Cost: one pass over the bytes, and 8 bytes a sequence.

    Unlike CNTK, a dense sample with fewer values than the dimension is refused, as is whatever
    CNTK would skip with a warning.
    """
    return CNTKSamples(_File(path, streams, comm))


def load_cntk_sequences(
    path: str | os.PathLike[str], streams: Streams, *, comm: CommunicatorView | None = None
) -> CNTKSequences:
    """Open a file in CNTK's text format, for `SequenceSource`.

    A sequence has as many samples of a stream as its lines name: one a line at most, and of each
    stream one at least.

    Args:
        streams, comm: as for `load_cntk_text`. The samples of x are the tokens.
    Returns:
        The sequences. x is `Padded`, values float [m, longest, dimension], or int64 [m, longest]
        where it is `one_hot`; y as well, with lengths of its own, or an array [m, …] where it is
        `per_sequence`.
    Raises:
        UserError: as for `load_cntk_text`; or a sequence has no x, or x is `per_sequence`.

    Local; with `comm` collective. Cost: two passes over the bytes, and 16 bytes a sequence.
    """
    file = _File(path, streams, comm)
    if file.streams[file.x].per_sequence:
        raise UserError(f"streams[{file.x!r}]: x must not be per_sequence, as it holds the tokens")
    return CNTKSequences(file, by_ranks(file.samples_of_x, len(file), comm))


def _line_ids(file: TextFile, begins: IndexArray) -> IndexArray:
    """The sequence id of each line, int64 [lines]; -1 where it has none."""
    ids, digits = file.numbers_at(begins, file.size)
    if (digits > MOST_DIGITS).any():
        begin = int(begins[(digits > MOST_DIGITS).argmax()])
        raise file.wrong(begin, f"its sequence id must be less than 10**{MOST_DIGITS}")
    return np.where(digits > 0, ids, -1)
