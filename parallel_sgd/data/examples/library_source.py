"""The Python standard library's source as text for a byte-level model, without a download."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...errors import UserError
from ...validation import checked_seed, integer, number, shown
from ..dataset import SPLIT_STREAM, Dataset
from ..readers.parts import files_below
from ..validation import Array, DType, checked_targets, float_dtype

#: Folders to skip: tests, installed packages, and build outputs.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BUILT = ("config-", "_sysconfigdata")

File = tuple[str, int]  #: path below the library's folder, and size in bytes


class ByteWindows(Dataset):
    """Every byte of some files as a sample: y is the byte, x the preceding `context` bytes.

    A window never crosses a file boundary: before a file's first byte, x is filled with zeros.

    Args:
        files: the content of each file, by name; joined in this order.
        context: number of preceding bytes, at least 1.
    Raises:
        UserError: an argument is not as required.

    Local. Memory: each byte once, and `context` more for each file.

    >>> x, y = ByteWindows({"a.py": b"abc", "b.py": b"de"}, context=2).read(np.arange(5))
    >>> x.astype(int).tolist()
    [[0, 0], [0, 97], [97, 98], [0, 0], [0, 100]]
    >>> y.tolist()
    [97, 98, 99, 100, 101]
    """

    repeatable = True

    def __init__(self, files: Mapping[str, bytes], context: int = 8) -> None:
        self.context = integer("context", context, 1)
        if not isinstance(files, Mapping) or not all(
            isinstance(content, bytes) for content in files.values()
        ):
            raise UserError(f"files={shown(files)} must be a mapping from names to bytes")
        self.files = tuple(files)
        padding = bytes(self.context)
        parts = [part for content in files.values() for part in (padding, content)]
        parts.append(padding + b"\0")  # so that at least one window exists
        self._bytes = np.frombuffer(b"".join(parts), np.uint8)
        #: the index after the last sample of each file
        self._ends = np.array(list(accumulate(map(len, files.values()))), np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.files else 0

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        kind = float_dtype(dtype)
        begins = indexes + self.context * self._ends.searchsorted(indexes, side="right")
        windows = sliding_window_view(self._bytes, self.context + 1)[begins]
        x = windows[:, :-1].astype(kind or np.uint8)
        return x, checked_targets("y", windows[:, -1], indexes, kind, classes)

    def __repr__(self) -> str:
        return f"ByteWindows({len(self.files)} files, {len(self)} bytes, context={self.context})"


def library_source(
    context: int = 8, test: float = 0.1, seed: int = 0, *, most_bytes: int | None = None
) -> tuple[ByteWindows, ByteWindows]:
    """Load the source of Python's standard library, without its tests, as (training, test).

    About 12 MB in 730 files (Python 3.11). The test part consists of whole files: going through the
    files in an order drawn from the sorted paths and the seed, each file that still fits into the
    fraction `test` of the bytes is taken.

    Args:
        context: number of preceding bytes in x, at least 1.
        test: the fraction of the bytes to test on, between 0 and 1; an upper limit.
        seed: decides the test files; an integer of at least 0.
        most_bytes: a limit on the total size; files are taken in the same order if they still fit.
            None: all files.
    Returns:
        Two data sets with x float [n, context] and y int64 [n], bytes from 0 to 255. The same on
        every machine with the same library.
    Raises:
        UserError: an argument is out of range, no file is left for training or test, or the source
            is missing or cannot be read (some Python installations have no source).

    Local: every rank reads the files.
    """
    train, held_out = library_files(test, seed, most_bytes=most_bytes)
    return ByteWindows(train, context), ByteWindows(held_out, context)


def library_files(
    test: float = 0.1, seed: int = 0, *, most_bytes: int | None = None
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the content of the library's files by path, as (training, test).

    Arguments and errors as for `library_source`. Local.
    """
    fraction = number("test", test, 0, 1)
    room = math.inf if most_bytes is None else integer("most_bytes", most_bytes, 1)
    random = np.random.default_rng((checked_seed(seed), *SPLIT_STREAM))
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        found = files_below(folder, _is_source, _is_skipped)
        names = sorted((path, status.st_size) for path, status in found)
        if not names:
            raise UserError(f"{folder}: Python's library has no source files")
        files, _ = _fitting((names[i] for i in random.permutation(len(names))), room)
        testing, training = _fitting(files, fraction * sum(size for _, size in files))
        if not sum(size for _, size in testing) or not sum(size for _, size in training):
            raise UserError(
                f"test={test!r}, most_bytes={most_bytes!r} must leave at least one of "
                f"{len(names)} files in each part"
            )
        train, held_out = (
            {path: (folder / path).read_bytes() for path, _ in part} for part in (training, testing)
        )
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: Python's library cannot be read: {error.strerror}"
        ) from None
    return train, held_out


def _is_source(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(BUILT)


def _is_skipped(folder: str) -> bool:
    return folder in SKIPPED or folder.startswith(BUILT)


def _fitting(files: Iterable[File], room: float) -> tuple[list[File], list[File]]:
    """Split files into (taken, left): a file is taken if it fits into the remaining bytes."""
    taken: list[File] = []
    left: list[File] = []
    for file in files:
        fits = file[1] <= room
        (taken if fits else left).append(file)
        room -= file[1] if fits else 0
    return taken, left
