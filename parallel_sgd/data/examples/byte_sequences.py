"""Text as sequences of bytes with the next byte as target at every place, for a transformer."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ...errors import UserError
from ...files import content_of, reason
from ...validation import checked_path, integer, number, require_memory, shown
from ..dataset import Dataset
from ..readers.parts import Parts, files_below, is_system_file, kinds_of, parts_of
from ..validation import Array, DType, checked_targets, float_dtype
from .library_source import library_files

SEQUENCE_CONTEXT = 256
LAST_TENTH = 0.1


class ByteSequences(Dataset):
    """A text cut into sequences: x is `context` bytes, y the byte after each of them.

    Sequence i begins at byte i · context. So an epoch predicts every byte once, except the first
    byte and the remainder at the end.

    Args:
        text: not copied.
        context: the length of x and of y, at least 1.
    Raises:
        UserError: an argument is not as required.

    `read` returns x as int64 for any `dtype`: bytes are indexes of embeddings. Usable in a PyTorch
    `DataLoader` directly. Local. Memory: each byte once.

    >>> x, y = ByteSequences(b"abcdefg", context=3).read(np.arange(2))
    >>> x.tolist()
    [[97, 98, 99], [100, 101, 102]]
    >>> y.tolist()
    [[98, 99, 100], [101, 102, 103]]
    """

    repeatable = True

    def __init__(self, text: bytes, context: int = SEQUENCE_CONTEXT) -> None:
        self.context = integer("context", context, 1)
        if not isinstance(text, bytes):
            raise UserError(f"text={shown(text)} must be bytes")
        self._bytes = np.frombuffer(text, np.uint8)

    def __len__(self) -> int:
        return max(len(self._bytes) - 1, 0) // self.context

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        kind = float_dtype(dtype)  # checks dtype
        if not len(self):
            windows = np.empty((len(indexes), self.context + 1), np.uint8)
        else:
            begins = np.asarray(indexes) * self.context
            windows = sliding_window_view(self._bytes, self.context + 1)[begins]
        y = checked_targets("y", windows[:, 1:], indexes, kind, classes)
        return windows[:, :-1].astype(np.int64), y

    def __repr__(self) -> str:
        return f"ByteSequences({len(self._bytes)} bytes, context={self.context})"


def library_sequences(
    context: int = SEQUENCE_CONTEXT,
    test: float = 0.1,
    seed: int = 0,
    *,
    most_bytes: int | None = None,
) -> tuple[ByteSequences, ByteSequences]:
    """Load the source of Python's standard library as sequences of bytes: (training, test).

    Args:
        context: the length of a sequence, at least 1.
        test, seed, most_bytes: as for `library_source`; the same files, concatenated.
    Returns:
        Two data sets with x int64 [n, context] and y int64 [n, context], bytes from 0 to 255.
    Raises:
        UserError: as for `library_source`, or either part is shorter than a sequence.

    Local: every rank reads the files.
    """
    training, testing = library_files(test, seed, most_bytes=most_bytes)
    return _both(b"".join(training.values()), b"".join(testing.values()), context)


def text_sequences(
    folder: str | os.PathLike[str],
    context: int = SEQUENCE_CONTEXT,
    test: float | None = None,
    *,
    suffixes: Collection[str] = (".txt",),
) -> tuple[ByteSequences, ByteSequences]:
    """Load the text files of a folder as sequences of bytes: (training, test).

    All files below the folder whose names end in one of `suffixes` are joined, in the order of
    their paths. The last bytes are the test data; no byte is in both parts. If files are named as
    parts (wiki.train.txt and wiki.valid.txt), or folders are (``train/``, ``test/``), these are the
    two parts: see `parquet_parts`. A name with further words ("the test of honour.txt") is a part
    only if another part has the same further words. Hidden files and files of the operating system
    are skipped.

    Args:
        context: the length of a sequence, at least 1.
        test: the fraction of the bytes to test on, above 0 and below 1, whatever the names of the
            files. None: the named parts, or a tenth of the bytes if there are no parts.
        suffixes: case-sensitive; "" takes every file.
    Returns:
        Two data sets with x int64 [n, context] and y int64 [n, context], bytes from 0 to 255. The
        same on every machine with the same files.
    Raises:
        UserError: an argument is not as required, there is no such file, a file cannot be read or
            is no regular file, the names leave doubt about the test part, or the text of either
            part is too short for a sequence.

    Local: every rank reads the files.
    """
    place = checked_path("folder", folder)
    fraction = LAST_TENTH if test is None else number("test", test, 0, 1)
    listed = isinstance(suffixes, Collection) and not isinstance(suffixes, str)
    if not listed or not all(isinstance(suffix, str) for suffix in suffixes):
        raise UserError(
            f"suffixes={shown(suffixes)} must be a collection of texts, such as ('.txt',)"
        )
    endings = tuple(suffixes)
    try:
        found = files_below(
            place, lambda name: name.endswith(endings) and not is_system_file(name), is_system_file
        )
        files = sorted((path, status.st_size) for path, status in found)
    except OSError as error:
        raise UserError(f"{error.filename or place} cannot be read: {reason(error)}") from None
    if not files:
        raise UserError(f"{place} must hold files whose names end in {' or '.join(endings)}")
    require_memory(str(place), sum(size for _, size in files))
    paths = [place / path for path, _ in files]
    parts = _parts_in(place, paths) if test is None else None
    if parts is not None:
        return _both(_joined(paths, parts.train), _joined(paths, parts.test), context)
    text = _joined(paths, paths)
    cut = len(text) - round(fraction * len(text))
    return _both(text[:cut], text[cut:], context)


def _parts_in(folder: Path, files: Sequence[Path]) -> Parts | None:
    """Return the parts among the files and folders of a folder; None if no names say so."""
    entries = sorted({folder / path.relative_to(folder).parts[0] for path in files})
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for path, kind in kinds_of(entries).items():
        if kind:
            found[path.is_dir()].add(kind)
    # A folder "training" and a file "validation.py" are a program's.
    if not any("train" in kinds and len(kinds) > 1 for kinds in found.values()):
        return None
    try:
        return parts_of(folder, entries, classes=True)
    except UserError as error:
        raise UserError(f"{error}; test=0.1 splits the whole text by bytes") from None


def _joined(files: Sequence[Path], wanted: Sequence[Path]) -> bytes:
    """Return the content of the wanted files, and of the files in wanted folders."""
    return b"".join(content_of(str(f), f) for f in files if {f, *f.parents} & set(wanted))


def _both(training: bytes, testing: bytes, context: int) -> tuple[ByteSequences, ByteSequences]:
    both = ByteSequences(training, context), ByteSequences(testing, context)
    if not all(map(len, both)):
        raise UserError(
            f"context={both[0].context} must be less than the bytes of the training and the test "
            f"data: {len(training)} and {len(testing)}"
        )
    return both
