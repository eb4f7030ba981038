"""Index of a file in CNTK's text format: places of the sequences, and samples in their lines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import UserError
from ..order import IndexArray
from ..validation import Array
from ..view import CommunicatorView
from .cntk_streams import Sample, Stream, alias_of, checked_streams
from .text_file import (
    LARGEST_SPACE,
    MOST_DIGITS,
    TextFile,
    open_text,
    shown_token,
    split_over_ranks,
    together,
)

COMMENT = b"|#"
Streams = Mapping[str, Stream | Mapping[str, Any] | None]


class CNTKFile:
    """The sequences of a CNTK text file, indexed by place.

    Args:
        path: of the file.
        streams: all streams that may occur in the file; None marks a stream to skip.
        comm: see `load_cntk_text`.
    Raises:
        UserError: see `load_cntk_text`.

    Attributes:
        begins: int64 [sequences + 1], the first byte of each sequence, and the end of the last.

    Collective over `comm`. Cost: one pass over the bytes; memory: 8 bytes a sequence.
    """

    def __init__(
        self, path: str | os.PathLike[str], streams: Streams, comm: CommunicatorView | None
    ) -> None:
        self.file = open_text(path, comm)
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
            ids = split_over_ranks(lambda b, e: _line_ids(self.file, lines[b:e]), len(lines), comm)
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
            indexes: int [m], the sequences.
            kind: the float type of values.
            single: True requires exactly one sample of each stream in each sequence.
            only: the stream to parse; None: all.
        Returns:
            By stream: the concatenated samples of all sequences, and the number of samples of each.
        Raises:
            UserError: a line is not as required; the message names the line.
        """
        self.file.require_unchanged()
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
        """Return the samples of a sequence by stream."""
        begin, end = (int(self.begins[place]) for place in (index, index + 1))
        found: dict[str, list[Sample]] = {name: [] for name in self.streams}
        at = begin
        for line in self.file.text(begin, end).split(b"\n"):
            for name, sample in self._line_samples(line, at):
                one = single or self.streams[name].per_sequence
                if found[name] and (one or found[name][-1].line == at):
                    raise self.file.error_at(at, self._repeated_problem(name, single, one))
                found[name].append(sample)
            at += len(line) + 1
        missing = [name for name, samples in found.items() if not samples]
        if missing:
            raise self.missing_error(begin, missing[0])
        return found

    def _line_samples(self, line: bytes, at: int) -> list[tuple[str, Sample]]:
        """Return the samples of a line, each with the name of its stream, without comments."""
        head, *fields = line.split(b"|")
        head = head.rstrip()  # the index ignores an id after spaces
        if head and not (self._has_ids and head.isdigit()):
            if head.isdigit():
                problem = f"has the sequence id {shown_token(head)}, but the first line has none"
                raise self.file.error_at(at, problem)
            required = 'must begin with a sequence id or "|"'
            raise self.file.error_at(at, f"{required}: it begins with {shown_token(head)}")
        samples = []
        for field in fields:
            if field.startswith(b"#"):
                continue
            name, *values = field.split(None, 1)[:2] or [b""]
            if not name or not field.startswith(name):
                raise self.file.error_at(at, 'the name of a stream must follow "|"')
            if name not in self._names:
                raise self.file.error_at(at, self._unknown_problem(name))
            known = self._names[name]
            if known is not None:
                samples.append((known, Sample(values[0] if values else b"", at)))
        return samples

    def missing_error(self, begin: int, name: str) -> UserError:
        return self.file.error_at(begin, f"the sequence has no sample of {name!r}")

    def _unknown_problem(self, name: bytes) -> str:
        known = ", ".join(alias.decode() for alias in self._names)
        return f"stream {shown_token(name)} is not one of {known} (None as a stream skips it)"

    def _repeated_problem(self, name: str, single: bool, one: bool) -> str:
        if not one:
            return f"a line has two samples of {name!r}"
        hint = " (load_cntk_sequences reads sequences)" if single else ""
        return f"the sequence has a second sample of {name!r}{hint}"

    def samples_of_x(self, begin: int, end: int) -> IndexArray:
        """Return the number of samples of x in each sequence of a range.

        Cost: one pass over the bytes of these sequences.
        """
        alias = alias_of(self.x, self.streams[self.x])
        counts, first = [np.empty(0, np.int64)], begin
        while first < end:
            most = self.begins[first] + self.file.block
            after = min(max(int(self.begins.searchsorted(most)), first + 1), end)
            bounds = self.begins[first : after + 1]
            self.file.require_unchanged()
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
            raise self.missing_error(int(self.begins[begin + found.argmin()]), self.x)
        return found


def _line_ids(file: TextFile, begins: IndexArray) -> IndexArray:
    """Return the sequence id of each line, int64 [lines]; -1 for a line without id."""
    ids, digits = file.numbers_at(begins, file.size)
    if (digits > MOST_DIGITS).any():
        begin = int(begins[(digits > MOST_DIGITS).argmax()])
        raise file.error_at(begin, f"its sequence id must be less than 10**{MOST_DIGITS}")
    return np.where(digits > 0, ids, -1)
