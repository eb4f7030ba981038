"""Streams of a CNTK text file: parsing of the text after ``|name`` into arrays."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from ...errors import UserError
from ...validation import choice, integer, require_memory, set_validated, shown
from ..validation import Array
from .text_file import TextFile, shown_token


class Sample(NamedTuple):
    """The text of a stream's sample.

    Attributes:
        text: the values.
        line: the first byte of the line, for errors.
    """

    text: bytes
    line: int


@dataclass(frozen=True)
class Stream(ABC):
    """A stream of a CNTK text file.

    Args:
        dimension: of a sample, at least 1.
        alias: name of the stream in the file, if different.
        one_hot: each sample has a single 1 and is returned as its index, int64: the number of a
            class, or the id of a word.
        per_sequence: each sequence has exactly one sample: the label of the whole sequence.
    Raises:
        UserError: an argument is not as required.
    """

    dimension: int
    alias: str | None = None
    one_hot: bool = False
    per_sequence: bool = False

    def __post_init__(self) -> None:
        set_validated(
            self,
            dimension=integer("dimension", self.dimension, 1),
            one_hot=choice("one_hot", self.one_hot, (True, False)),
            per_sequence=choice("per_sequence", self.per_sequence, (True, False)),
        )
        if self.alias is not None:
            require_name("alias", self.alias)

    def read(self, samples: list[Sample], kind: np.dtype[Any], file: TextFile) -> Array:
        """Parse samples.

        Args:
            samples: the texts and lines.
            kind: the float type of values.
            file: for errors.
        Returns:
            int64 [samples] if `one_hot`, else float [samples, dimension].
        Raises:
            UserError: a sample is not as required; the message names its line.
        """
        try:
            return self._read([sample.text for sample in samples], kind)
        except _BadSample:
            for sample in samples:
                try:
                    self._read([sample.text], kind)
                except _BadSample as error:
                    raise file.error_at(sample.line, str(error)) from None
            raise

    def _read(self, texts: list[bytes], kind: np.dtype[Any]) -> Array:
        """Parse samples without naming lines; see `read`.

        Raises:
            _BadSample: a sample is not as required. The message describes the problem only if
                `texts` has a single sample.
        """
        rows, columns, values = self._parsed(texts, np.dtype(np.float64) if self.one_hot else kind)
        if not self.one_hot:
            shape = len(texts), self.dimension
            require_memory(f"samples {list(shape)}", math.prod(shape) * kind.itemsize)
            dense = np.zeros(shape, kind)
            dense[rows, columns] = values
            return dense
        hot = values != 0
        rows = rows[hot]
        places: Array = columns[hot]
        if not (np.array_equal(rows, np.arange(len(texts))) and (values[hot] == 1).all()):
            raise _BadSample(f"{shown_token(texts[0].strip())} must be a single 1, and zeros")
        return places

    @abstractmethod
    def _parsed(self, texts: list[bytes], kind: np.dtype[Any]) -> tuple[Array, Array, Array]:
        """Return the checked values of samples: for each value its sample, index and value.

        Samples and indexes count from 0.
        """


@dataclass(frozen=True)
class Dense(Stream):
    """A stream whose samples list all their values: ``|name 0.5 1 -2e3``. See `Stream`."""

    def _parsed(self, texts: list[bytes], kind: np.dtype[Any]) -> tuple[Array, Array, Array]:
        tokens = [text.split() for text in texts]
        for own in tokens:
            if len(own) != self.dimension:
                raise _BadSample(f"a sample has {len(own)} values: must be {self.dimension}")
        rows, columns = np.indices((len(texts), self.dimension))
        return rows.ravel(), columns.ravel(), _numbers([*chain(*tokens)], texts, kind)


@dataclass(frozen=True)
class Sparse(Stream):
    """A stream whose samples list non-zero values by index: ``|name 3:1 17:0.5``. See `Stream`.

    Indexes begin at 0. A sample may be empty. Samples are returned as dense rows.
    """

    def _parsed(self, texts: list[bytes], kind: np.dtype[Any]) -> tuple[Array, Array, Array]:
        tokens = [text.split() for text in texts]
        rows = np.repeat(np.arange(len(texts)), [*map(len, tokens)])
        pairs = [*map(bytes.partition, chain(*tokens), repeat(b":"))]
        names, colons, values = zip(*pairs, strict=True) if pairs else ((),) * 3
        try:
            columns = np.array([*map(int, names)], np.int64)
        except (ValueError, OverflowError):
            columns = np.full(len(rows), -1)
        if not all(colons) or (columns < 0).any() or any(b"_" in text for text in texts):
            raise _BadSample(f"{_first_bad(pairs)} must be index:value")
        if (columns >= self.dimension).any():
            most = self.dimension - 1
            raise _BadSample(f"index {columns.max()} is out of range: must be from 0 to {most}")
        order = np.lexsort((columns, rows))
        if ((np.diff(columns[order]) == 0) & (np.diff(rows[order]) == 0)).any():
            raise _BadSample("a sample names an index twice")
        return rows, columns, _numbers([*values], texts, kind)


class _BadSample(Exception):
    """A description of the problem in a sample."""


def _first_bad(pairs: list[tuple[bytes, bytes, bytes]]) -> str:
    for name, colon, value in pairs:
        if not (name.isdigit() and colon) or b"_" in value:
            return shown_token(name + colon + value)
    return "an index"  # too large for int64


def _numbers(tokens: list[bytes], texts: list[bytes], kind: np.dtype[Any]) -> Array:
    """Convert tokens to numbers of a float type; raise a _BadSample if a token is not finite."""
    try:
        if any(b"_" in text for text in texts):  # Python accepts "_" in numbers
            raise ValueError
        exact = np.array([*map(float, tokens)], np.float64)
    except ValueError:
        exact = np.array([_number(token) for token in tokens])
    with np.errstate(over="ignore"):
        values = exact.astype(kind)
    if not np.isfinite(values).all():
        token = shown_token(tokens[int((~np.isfinite(values)).argmax())])
        raise _BadSample(f"{token} must be a finite number, in {kind}")
    return values


def _number(token: bytes) -> float:
    try:
        return float(token) if b"_" not in token else np.nan
    except ValueError:
        return np.nan


def require_name(argument: str, name: Any) -> None:
    """Check a stream's name: text without spaces and "|", not beginning with "#".

    Raises:
        UserError: the name is not as required.
    """
    if isinstance(name, str) and name.split() == [name] and "|" not in name and name[0] != "#":
        return
    raise UserError(f'{argument}={shown(name)} must be a text without spaces, "|", and a first "#"')


def checked_streams(streams: Any) -> dict[str, Stream | None]:
    """Check the streams given by the user, and convert plain values to streams.

    Returns:
        The streams of a file by name; None for a stream to skip.
    Raises:
        UserError: not a mapping from names to streams or None, fewer than two streams, or two
            streams with the same name in the file.
    """
    if not isinstance(streams, Mapping):
        raise UserError(f"streams={shown(streams)} must be a mapping from names to streams")
    for name in streams:
        require_name("streams: a name", name)
    checked = {name: _stream(name, stream) for name, stream in streams.items()}
    if len(checked) - list(checked.values()).count(None) < 2:
        given = shown(dict(streams))
        raise UserError(f"streams={given} must be at least two: x is the first, y the last")
    aliases = [alias_of(name, stream) for name, stream in checked.items()]
    for alias in aliases:
        if aliases.count(alias) > 1:
            raise UserError(f"streams: two streams have the name {alias.decode()!r} in the file")
    return checked


def _stream(name: str, given: Any) -> Stream | None:
    """Convert a stream, possibly in plain values such as ``{"dense": 784, "one_hot": True}``."""
    if isinstance(given, Stream | None):
        return given
    kinds: dict[str, type[Stream]] = {"dense": Dense, "sparse": Sparse}
    if isinstance(given, Mapping):
        options = dict(given)
        dimensions = {kind: options.pop(kind) for kind in kinds if kind in given}
        if len(dimensions) == 1 and options.keys() <= {"alias", "one_hot", "per_sequence"}:
            ((kind, dimension),) = dimensions.items()
            return kinds[kind](dimension, **options)
    raise UserError(
        f"streams[{name!r}]={shown(given)} must be Dense(…), Sparse(…), or None to skip the "
        'stream; in plain values {"dense": 784, "one_hot": True}'
    )


def alias_of(name: str, stream: Stream | None) -> bytes:
    """Return the name of a stream in the file."""
    return ((stream and stream.alias) or name).encode()
