"""CNTK's text format: lines with samples of several streams, and sequences of several lines."""

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
    """The sequences of a CNTK text file with one sample each; opened by `load_cntk_text`."""

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
        """Read all streams of some samples, by name.

        Returns:
            float [m, dimension] for each stream, or int64 [m] if the stream is `one_hot`.
        Raises:
            UserError: as for `read`. Local.
        """
        kind = float_dtype(dtype) or np.dtype(np.float64)
        read = self._file.read(indexes, kind, single=True)
        return {name: values for name, (values, _) in read.items()}

    def __repr__(self) -> str:
        return f"CNTKSamples({self._file!r})"


class CNTKSequences(Sequences):
    """The sequences of a CNTK text file; opened by `load_cntk_sequences`."""

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
        """Read all streams of some sequences, by name; arguments as for `read`. Local.

        Returns:
            `Padded` for each stream, with its own lengths; an array [m, …] if the stream is
            `per_sequence`.
        """
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
    """Open a file in CNTK's text format, with one sample of each stream in each sequence.

    A line is ``[sequence id] |name values |name values |# comment``, with spaces or tabs.
    Consecutive lines with the same id form a sequence; a line without id continues the sequence of
    the last id. Without any ids, each line is a sequence. Blank lines are ignored. A comment ends
    at the next "|" other than "|#". A line is parsed when read, and errors name the line.

    Args:
        path: of the file.
        streams: by name: `Dense` or `Sparse` with their dimension, also in plain values as
            ``{"dense": 784, "one_hot": True}``, or None for a stream to skip. The first is x, the
            last y.
        comm: each rank indexes its part of the file, and all ranks get the whole index; None: this
            rank indexes the whole file.
    Returns:
        The data set: x and y are float [m, dimension], or int64 [m] if they are `one_hot`.
    Raises:
        UserError: an argument is not as required, or the file cannot be read or holds no samples; a
            SharedError on all ranks of `comm`.

    Local; with `comm` collective. Cost: one pass over the bytes; memory: 8 bytes a sequence.

    Unlike in CNTK, a dense sample with fewer values than the dimension is an error, and so is
    anything that CNTK would skip with a warning.
    """
    return CNTKSamples(CNTKFile(path, streams, comm))


def load_cntk_sequences(
    path: str | os.PathLike[str], streams: Streams, *, comm: CommunicatorView | None = None
) -> CNTKSequences:
    """Open a file in CNTK's text format, for `SequenceSource`.

    A sequence has as many samples of a stream as its lines contain: at most one in a line, and at
    least one of each stream.

    Args:
        path: of the file.
        streams, comm: as for `load_cntk_text`. The samples of x are the tokens.
    Returns:
        The sequences. x is `Padded`, with values float [m, longest, dimension], or int64 [m,
        longest] if x is `one_hot`; y likewise, with its own lengths, or an array [m, …] if y is
        `per_sequence`.
    Raises:
        UserError: as for `load_cntk_text`; or a sequence has no x, or x is `per_sequence`.

    Local; with `comm` collective. Cost: two passes over the bytes; memory: 16 bytes a sequence.
    """
    file = CNTKFile(path, streams, comm)
    if file.streams[file.x].per_sequence:
        raise UserError(f"streams[{file.x!r}]: x must not be per_sequence, as it holds the tokens")
    return CNTKSequences(file, split_over_ranks(file.samples_of_x, len(file), comm))
