"""Text files of many records: indexed by a pass over the bytes, and parsed as they are read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from ...errors import UserError
from ...validation import LARGEST_INTEGER, checked_path, require_memory
from ..mapping import mapped_file, mapping_of
from ..order import IndexArray
from ..unchanged import Identity, require_same
from ..validation import Array
from ..view import CommunicatorView, require_ranks

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LARGEST_SPACE = ord(" ")  #: all bytes up to this are blank
MOST_DIGITS = 18  #: digits of any number in int64
SHOWN = 40  #: bytes of a token shown in an error

Result = TypeVar("Result")


class TextFile:
    """A memory-mapped text file: lines by place, and errors that name a line.

    Args:
        path: of a file that is not empty. A byte order mark at the beginning is skipped.
    Raises:
        UserError: the file cannot be read, is no regular file, or is empty.

    Attributes:
        block: bytes searched at a time.

    The constructor reads nothing. A pickled TextFile is reopened on loading, if unchanged. Local.
    """

    block: ClassVar[int] = 1 << 20

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = checked_path("path", path, "file")
        self.name = str(path)
        self.bytes: Array = mapped_file(self.path)
        mapping = mapping_of(self.bytes)
        if mapping is None:
            raise UserError(f"{self.name} is empty")
        self._mapping = mapping
        self.pages, self.size = mapping.pages, mapping.end
        self.bytes = np.asarray(self.bytes)  # slicing a plain array is ten times as fast
        self.begin = len(BYTE_ORDER_MARK) * (self.pages[:3] == BYTE_ORDER_MARK)

    def __reduce__(self) -> Any:
        path = Path(os.path.abspath(self.path))
        return type(self)._reopened, (path, tuple(self._mapping.before or ()), self.name)

    @classmethod
    def _reopened(cls, path: Path, before: tuple[int, ...], name: str) -> TextFile:
        file = cls(path)
        file.name = name
        if before and file._mapping.before is not None:
            require_same(name, Identity(*before), file._mapping.before)
        return file

    def require_whole(self) -> None:
        """Raise a UserError if the file has become shorter. Local. Cost: a system call."""
        self._mapping.require_whole(self.name)

    def require_unchanged(self) -> None:
        """Raise a UserError if the file has become shorter or was written to.

        Local. Cost: some microseconds, once a minibatch.
        """
        self._mapping.require_unchanged(self.name)

    def blocks(self, begin: int, end: int) -> Iterator[tuple[int, Array]]:
        """Yield consecutive parts of the file: the place of each, and its bytes."""
        for at in range(begin, end, self.block):
            self.require_unchanged()
            yield at, self.bytes[at : min(at + self.block, end)]

    def line_begins(self, comm: CommunicatorView | None = None) -> IndexArray:
        """Return the places of the first bytes of all lines: int64 [lines].

        Args:
            comm: each rank searches its part of the bytes; None: this rank searches all.

        Collective over `comm`. Cost: one pass over the bytes; memory: 8 bytes a line.
        """

        def newlines(begin: int, end: int) -> IndexArray:
            found = [at + np.flatnonzero(part == ord("\n")) for at, part in self.blocks(begin, end)]
            return np.concatenate([np.empty(0, np.int64), *found])

        begins = np.concatenate([[self.begin], 1 + split_over_ranks(newlines, self.size, comm)])
        return begins[begins < self.size]

    def without_blank(self, begins: IndexArray, comment: bytes) -> IndexArray:
        """Return `begins` without lines that are blank or hold only comments."""
        first, keep = self.bytes[begins], np.ones(len(begins), bool)
        second = self.bytes[np.minimum(begins + 1, self.size - 1)]
        comments = (first == comment[0]) & (second == comment[1] if len(comment) > 1 else True)
        for line in np.flatnonzero((first <= LARGEST_SPACE) | comments):
            content = self.line(int(begins[line])).strip()
            begins_all = content.count(comment) == content.count(comment[:1])
            keep[line] = content != b"" and not (content.startswith(comment) and begins_all)
        return begins[keep]

    def line(self, begin: int) -> bytes:
        """Return the line that begins at a place, without its line end. Errors as for `text`."""
        self.require_whole()
        end = self.pages.find(b"\n", begin)
        return self.text(begin, self.size if end < 0 else end)

    def text(self, begin: int, end: int) -> bytes:
        """Return a part of the file, such as a record. Local.

        Raises:
            UserError: the file has become shorter, or the part would not fit into memory.
        """
        self.require_whole()
        require_memory(f"{self.name}: the record that begins at byte {begin}", end - begin)
        return self.pages[begin:end]

    def numbers_at(self, places: IndexArray, end: int) -> tuple[IndexArray, IndexArray]:
        """Parse the whole numbers at some places of the file, in decimal digits.

        Args:
            places: of their first digits, each below `end`.
            end: digits from here on are ignored.
        Returns:
            int64 [places], the numbers; int64 [places], their numbers of digits, or 19 for more
            than 18 digits: the number is then made of the first 18.
        """
        values, digits = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
        going_on = np.arange(len(places))
        for count in range(MOST_DIGITS + 1):
            at = places[going_on] + count
            going_on, at = going_on[at < end], at[at < end]
            digit = self.bytes[at] - np.uint8(ord("0"))  # wraps around if not a digit
            going_on, digit = going_on[digit <= 9], digit[digit <= 9]
            if not len(going_on):
                break
            if count < MOST_DIGITS:
                values[going_on] = 10 * values[going_on] + digit
            digits[going_on] += 1
        return values, digits

    def error_at(self, begin: int, problem: str) -> UserError:
        """Return an error that names the line beginning at a place, and the problem in this line.

        Lines are counted from 1, bytes from 0. Cost: a pass over the bytes before the line.
        """
        before = sum(np.count_nonzero(part == ord("\n")) for _, part in self.blocks(0, begin))
        return UserError(f"{self.name}, line {before + 1} (byte {begin}): {problem}")


def open_text(path: str | os.PathLike[str], comm: CommunicatorView | None) -> TextFile:
    """Open a text file on this rank, or the same file on all ranks.

    Raises:
        UserError: see `TextFile`. A SharedError on all ranks of `comm`, also if the sizes of their
            files differ.

    Collective over `comm`.
    """
    if comm is not None:
        require_ranks(comm)
    file = together(lambda: TextFile(path), comm)
    if comm is not None:
        comm.require_agreement({f"the size of {file.path.name}": file.size})
    return file


def together(prepare: Callable[[], Result], comm: CommunicatorView | None) -> Result:
    """Call `prepare`; if any rank of `comm` raises a UserError, all ranks raise. Collective."""
    if comm is None:
        return prepare()
    done, problem = [], None
    try:
        done.append(prepare())
    except UserError as error:
        problem = str(error)
    comm.raise_together(problem)
    return done[0]


def split_over_ranks(
    find: Callable[[int, int], Array], count: int, comm: CommunicatorView | None
) -> Array:
    """Return `find(0, count)`, computed by all ranks of `comm`, each for its part of the range.

    Args:
        find: returns an array for a range (begin, end). The arrays of adjoining ranges, joined, are
            the array of the whole.

    Collective over `comm`.
    """
    if comm is None:
        return find(0, count)
    require_ranks(comm)
    begin, end = (count * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    local = together(lambda: find(begin, end), comm)
    return np.concatenate(comm.allgather_object(local))


def shown_token(token: bytes) -> str:
    """Format a token of a file for an error: in a single line, and not too long."""
    return repr(token[:SHOWN])[1:] + ("..." if len(token) > SHOWN else "")


def finite_number(token: bytes) -> float:
    """Parse a finite number.

    Raises:
        ValueError: the token is no number, or not finite, or has underscores, as Python allows.
    """
    value = float(token)
    if b"_" in token or not math.isfinite(value):
        raise ValueError
    return value


def whole_number(token: bytes) -> int:
    """Parse a whole number, such as 3, -1, 3.0 or 1e3.

    Raises:
        ValueError: the token is no whole number, or too large for int64.
    """
    try:
        value = int(token)
    except ValueError:
        exact = finite_number(token)
        if not exact.is_integer():
            raise
        value = int(exact)
    if b"_" in token or abs(value) > LARGEST_INTEGER:
        raise ValueError
    return value
