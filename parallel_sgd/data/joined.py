"""Several data sets joined into one, such as the files of a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from ..errors import UserError
from ..validation import shown, text
from .dataset import Dataset, require_dataset
from .validation import Array, DType


class Joined(Dataset):
    """Data sets joined end to end: sample indexes run through the first data set, then the next.

    Args:
        datasets: at least 1, with samples of equal shape. Errors name the place in the data set of
            the sample.
        name: for `repr`.
    Raises:
        UserError: the list is empty, or an element is not a data set.

    >>> from .dataset import Arrays
    >>> first, second = (Arrays(np.full((n, 1), n), np.arange(n)) for n in (2, 3))
    >>> Joined([first, second]).read(np.array([4, 0, 2]))[1].tolist()
    [2, 0, 0]
    """

    def __init__(self, datasets: Sequence[Dataset], *, name: str = "") -> None:
        if not isinstance(datasets, Iterable):
            raise UserError(f"datasets={shown(datasets)} must be a list of at least one data set")
        self.datasets = tuple(
            require_dataset(f"datasets[{i}]", dataset) for i, dataset in enumerate(datasets)
        )
        if not self.datasets:
            raise UserError("datasets=[] must be at least one data set")
        self.name = text("name", name) or f"{len(self.datasets)} data sets"
        self.repeatable = all(dataset.repeatable for dataset in self.datasets)
        classes = {dataset.classes for dataset in self.datasets}
        self.classes = classes.pop() if len(classes) == 1 else None
        self._ends = np.array(list(accumulate(map(len, self.datasets))), np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        where = self._where(indexes)
        parts = [
            self.datasets[number].read(local, dtype=dtype, classes=classes)
            for number, _, local in where
        ]
        xs, ys = zip(*parts, strict=True)
        return self._arranged("x", xs, where), self._arranged("y", ys, where)

    def targets(self, indexes: Array) -> Array:
        where = self._where(indexes)
        ys = tuple(self.datasets[number].targets(local) for number, _, local in where)
        return self._arranged("y", ys, where)

    def _where(self, indexes: Array) -> list[tuple[int, Array, Array]]:
        """Return (number, places in the minibatch, own indexes) for each data set to read."""
        numbers = self._ends.searchsorted(indexes, side="right")
        where = []
        for number in np.unique(numbers).tolist() or [0]:
            places = np.flatnonzero(numbers == number)
            begin = self._ends[number] - len(self.datasets[number])
            where.append((number, places, np.asarray(indexes)[places] - begin))
        return where

    def _arranged(
        self, name: str, parts: tuple[Array, ...], where: list[tuple[int, Array, Array]]
    ) -> Array:
        for part, (number, _, _) in zip(parts, where, strict=True):
            if part.shape[1:] != parts[0].shape[1:] or part.dtype.kind != parts[0].dtype.kind:
                first = self.datasets[where[0][0]]
                raise UserError(
                    f"{name} must have the same shape and type in all data sets: "
                    f"{list(part.shape[1:])} {part.dtype} in {self.datasets[number]!r}, "
                    f"{list(parts[0].shape[1:])} {parts[0].dtype} in {first!r}"
                )
        if len(parts) == 1:
            return parts[0]
        samples = sum(map(len, parts))
        whole = np.empty((samples, *parts[0].shape[1:]), np.result_type(*parts))
        for part, (_, places, _) in zip(parts, where, strict=True):
            whole[places] = part
        return whole

    def __repr__(self) -> str:
        return f"Joined({self.name}, {len(self)} samples)"
