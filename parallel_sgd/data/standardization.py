"""Standardization of features to mean 0 and standard deviation 1 over the training set."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..validation import checked_path, instance
from .dataset import Dataset, Wrapped, require_dataset
from .readers.files import npz_member
from .readers.text_file import split_over_ranks
from .validation import Array, DType, as_array, checked_inputs, float_dtype
from .view import CommunicatorView

STANDARDIZATION = "standardization.npz"  #: file name in a run's folder
PARTS = 256  #: parts of the data with separate moments, at most; the same for any number of ranks
MOMENTS = 5
MOST_BYTES = 1 << 25  #: limit on the samples read at a time, and on the moments exchanged by ranks


@dataclass(frozen=True, eq=False)
class Standardization:
    """Means and scales of features: x becomes (x - mean) / scale.

    Attributes:
        mean: float64, of a sample's shape: the mean of each feature over the training set.
        scale: float64, of the same shape: the standard deviation; 1 for a constant feature.
    """

    mean: npt.NDArray[np.float64]
    scale: npt.NDArray[np.float64]

    @classmethod
    def of(cls, train: Dataset, comm: CommunicatorView | None = None) -> Standardization:
        """Compute mean and scale over a data set, the same bits for any number of ranks.

        Args:
            train: at least 1 sample.
            comm: each rank reads its part of the data; None: this rank reads all samples.
        Returns:
            The standardization, the same on all ranks of `comm`.
        Raises:
            UserError: there are no samples, x holds ids, a value is not finite, or a standard
                deviation is not; a SharedError on all ranks of `comm`.

        Local; with `comm` collective. Cost: one pass over the data.
        """
        require_dataset("train", train)
        if not len(train):
            raise UserError(f"{train!r} has no samples to compute a standardization of")
        shape = _floats(train, np.arange(0)).shape[1:]
        parts = min(max(MOST_BYTES // (8 * MOMENTS * max(math.prod(shape), 1)), 1), PARTS)
        bounds = np.linspace(0, len(train), parts + 1).astype(np.int64)

        def moments(begin: int, end: int) -> Array:
            pairs = zip(bounds[begin:end], bounds[begin + 1 : end + 1], strict=True)
            found = [_moments_of(train, first, after) for first, after in pairs if first < after]
            return np.stack(found) if found else np.empty((0, MOMENTS, *shape))

        samples, mean, squares, least, largest = reduce(
            _merged, split_over_ranks(moments, parts, comm)
        )
        scale = np.sqrt(squares / samples)
        if not (np.isfinite(mean).all() and np.isfinite(scale).all()):
            raise UserError(f"{train!r} has features too large to be standardized")
        return cls(mean, np.where((least == largest) | (scale == 0), 1.0, scale))

    def apply(self, x: Any, dtype: DType = np.float32) -> Array:
        """Standardize inputs.

        Args:
            x: [m, …], numbers of the shape of the training set's samples; not changed.
            dtype: the float type of the result; None: float64.
        Returns:
            [m, …], a new array.
        Raises:
            UserError: x has another shape, or a result is not finite.

        Local.
        """
        array = as_array("x", x)
        return self.apply_at(np.arange(len(array)), array, float_dtype(dtype))

    def apply_at(self, indexes: Array, x: Array, dtype: np.dtype[Any] | None) -> Array:
        """Standardize samples of a data set as `apply` does; errors name their `indexes`. Local."""
        if x.shape[1:] != self.mean.shape:
            raise UserError(
                f"x has samples {list(x.shape[1:])}: must be {list(self.mean.shape)}, as in "
                "the data of the standardization"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (x - self.mean) / self.scale
        return checked_inputs("standardized x", scaled, indexes, dtype)

    def given(self, dataset: Dataset) -> Dataset:
        """Return the data set with its x standardized as it is read. Local.

        Raises:
            UserError: samples have another shape than `mean`.
        """
        self.apply(_floats(dataset, np.arange(0)))
        return Standardized(dataset, self)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write mean and scale to a new file. Local.

        Raises:
            OSError: the file cannot be written.
        """
        with Path(path).open("wb") as file:
            np.savez(file, mean=self.mean, scale=self.scale)


def read_standardization(path: str | os.PathLike[str]) -> Standardization | None:
    """Read the standardization of a run.

    Args:
        path: of the run's folder, of its ``model.npz``, or of the file itself.
    Returns:
        The standardization; None if the run has not standardized.
    Raises:
        UserError: the file is damaged.

    Nothing in the file is executed. Local.
    """
    place = checked_path("path", path, "run's folder")
    folder = place if place.is_dir() else place.parent
    file = folder / STANDARDIZATION
    if not file.is_file():
        return None
    mean, scale = (np.array(npz_member(file, name)) for name in ("mean", "scale"))
    both = mean.dtype == scale.dtype == np.float64 and mean.shape == scale.shape
    if not (both and np.isfinite(mean).all() and np.isfinite(scale).all() and (scale > 0).all()):
        raise UserError(
            f"{file} must hold finite float64 mean and scale of equal shape, and the scale above 0"
        )
    return Standardization(mean, scale)


class Standardized(Wrapped):
    """Another data set with its x standardized as it is read.

    Args:
        dataset: source of the samples; errors name the place in this data set.
        by: the standardization.
    Raises:
        UserError: an argument is not as required.
    """

    def __init__(self, dataset: Dataset, by: Standardization) -> None:
        super().__init__(dataset)
        self.by = instance("by", by, Standardization, "data.Standardization.of(train)")

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        kind = float_dtype(dtype)
        x, y = self.dataset.read(indexes, dtype=np.float64, classes=classes)
        if y.dtype.kind == "f" and kind is not None:
            y = checked_inputs(self.y_name, y, indexes, kind)
        return self.by.apply_at(indexes, x, kind), y


def _floats(dataset: Dataset, indexes: Array) -> Array:
    x, _ = dataset.read(indexes, dtype=np.float64)
    if x.dtype.kind != "f":
        raise UserError(f"{dataset!r} has ids for x, {x.dtype}: ids cannot be standardized")
    return x


def _moments_of(dataset: Dataset, begin: int, end: int) -> Array:
    """Return the moments of each feature over samples `begin` to `end`, at least 1 sample.

    [5, …]: number of samples, mean, sum of squared differences from the mean, minimum, maximum.
    """
    first = _floats(dataset, np.arange(begin, begin + 1))
    batch = max(MOST_BYTES // max(first.nbytes, 1), 1)
    parts = (np.arange(i, min(i + batch, end)) for i in range(begin, end, batch))
    return reduce(_merged, (_moments(_floats(dataset, indexes)) for indexes in parts))


def _moments(x: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        mean = x.mean(axis=0)
        squares = ((x - mean) ** 2).sum(axis=0)
    samples = np.full_like(mean, len(x))
    return np.stack([samples, mean, squares, x.min(axis=0), x.max(axis=0)])


def _merged(a: Array, b: Array) -> Array:
    """Merge the moments of two sets of samples (Chan, Golub and LeVeque, 1979)."""
    samples = a[0] + b[0]
    with np.errstate(over="ignore", invalid="ignore"):
        difference = b[1] - a[1]
        mean = a[1] + difference * (b[0] / samples)
        squares = a[2] + b[2] + difference**2 * (a[0] * b[0] / samples)
    return np.stack([samples, mean, squares, np.minimum(a[3], b[3]), np.maximum(a[4], b[4])])
