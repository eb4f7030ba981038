"""CNTK's text format: samples of several streams a line, and sequences of several lines."""

from __future__ import annotations

import os

import numpy as np

from ...errors import UserError
from ..dataset import Dataset
from ..order import IndexArray
from ..sequences import Padded, Sequences, filled_up
from ..validation import Array, DType, checked_labels, float_dtype
from ..view import CommunicatorView
from .cntk_file import CNTKFile, Streams
from .text_file import split_over_ranks


class CNTKSamples(Dataset):
    """The sequences of a CNTK text file, of one sample each; see `load_cntk_text`."""

    repeatable = True

    def __init__(self, file: CNTKFile) -> None:
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

    def __init__(self, file: CNTKFile, lengths: IndexArray) -> None:
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
        streams: by name: `Dense` or `Sparse` with their dimension, also in plain values as
            ``{"dense": 784, "one_hot": True}``, or None for one to skip. The first is x, the last
            y.
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
    return CNTKSamples(CNTKFile(path, streams, comm))


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
    file = CNTKFile(path, streams, comm)
    if file.streams[file.x].per_sequence:
        raise UserError(f"streams[{file.x!r}]: x must not be per_sequence, as it holds the tokens")
    return CNTKSequences(file, split_over_ranks(file.samples_of_x, len(file), comm))
