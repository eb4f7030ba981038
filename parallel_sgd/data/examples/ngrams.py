"""The standard library's source as hashed n-grams: ids for a language model's embedding table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import UserError
from ...validation import integer, shown
from ..dataset import Dataset
from ..hashing import LARGEST_ID, mixed
from ..validation import Array, DType, float_dtype
from .library_source import ByteWindows, library_files

NGRAM_CLASSES = 256
ORDERS = (1, 2, 3, 4, 5, 6)


class NGrams(Dataset):
    """Every byte of some files as a sample: y is the byte, x the ids of the preceding n-grams.

    The id of order n is a 63-bit hash of the n bytes before y and of n itself. In a library of 10^7
    bytes the probability that any two different n-grams have the same id is a few in 10^4. Zeros
    precede a file's first byte.

    Args:
        files: the content of each file, by name; joined in this order.
        orders: each n once, at least 1.
    Raises:
        UserError: `orders` is not as required.

    `read` hashes the requested samples, and returns int64 ids for any `dtype`: floats cannot
    represent all ids. Local. Memory: each byte once, and max(orders) more for each file.

    >>> x, y = NGrams({"a.py": b"abab"}, orders=(1, 2)).read(np.arange(4))
    >>> x.shape, y.tolist()
    ((4, 2), [97, 98, 97, 98])
    >>> bool(x[1, 0] == x[3, 0]), bool(x[1, 1] == x[3, 1])  # "a" before both "b"; "\\0a" and "ba"
    (True, False)
    """

    repeatable = True

    def __init__(self, files: Mapping[str, bytes], orders: Sequence[int] = ORDERS) -> None:
        self.orders = _checked(orders)
        self.windows = ByteWindows(files, max(self.orders))

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files."""
        return self.windows.files

    def __len__(self) -> int:
        return len(self.windows)

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        float_dtype(dtype)  # checks dtype
        windows, y = self.windows.read(indexes, dtype=None, classes=classes)
        x = np.empty((len(windows), len(self.orders)), np.int64)
        hashes = np.zeros(len(windows), np.uint64)
        for n in range(1, max(self.orders) + 1):  # hash of the n bytes before y, nearest first
            hashes = mixed(hashes + (windows[:, -n] + np.uint64(1)))
            if n in self.orders:
                x[:, self.orders.index(n)] = hashes & np.uint64(LARGEST_ID)
        return x, y

    def __repr__(self) -> str:
        return f"NGrams({len(self.files)} files, {len(self)} bytes, orders={self.orders})"


def library_ngrams(
    orders: Sequence[int] = ORDERS,
    test: float = 0.1,
    seed: int = 0,
    *,
    most_bytes: int | None = None,
) -> tuple[NGrams, NGrams]:
    """Load the source of Python's standard library as hashed n-grams: (training, test).

    Args:
        orders: lengths of the n-grams before each byte, each at least 1.
        test, seed, most_bytes: as for `library_source`; the same files and the same samples.
    Returns:
        Two data sets with x int64 [n, len(orders)] and y int64 [n], bytes from 0 to 255.
    Raises:
        UserError: as for `library_source`, or `orders` is not as required.

    Local: every rank reads the files.
    """
    orders = _checked(orders)
    training, testing = library_files(test, seed, most_bytes=most_bytes)
    return NGrams(training, orders), NGrams(testing, orders)


def _checked(orders: Sequence[int]) -> tuple[int, ...]:
    try:
        lengths = tuple(integer(f"orders[{i}]", n, 1) for i, n in enumerate(orders))
    except TypeError:
        lengths = ()
    if not lengths or len(set(lengths)) < len(lengths):
        raise UserError(f"orders={shown(orders)} must be whole numbers without repeats")
    return lengths
