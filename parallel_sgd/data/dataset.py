"""Data sets: numbered samples, read by index."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ..errors import UserError
from ..validation import checked_seed, instance, integer, kind_of, require_memory, shown, text
from .mapping import MappedArray, mapping_of
from .validation import (
    Array,
    DType,
    as_array,
    check_numbers,
    checked_inputs,
    checked_targets,
    float_dtype,
    require_one_index,
)

TOGETHER = 1024  #: samples read at a time by the default `targets`
LARGEST_BYTE = 255
SPLIT_STREAM = (0, 1)  #: follows the seed of a split; an epoch's order is (seed, epoch)


class Dataset(ABC):
    """Numbered samples, each an input x and a target y (the label of a class, a value, …).

    Only the requested samples are read.

    Attributes:
        repeatable: True if reading a sample again returns the same values, and soon. False if this
            is not known.
        classes: the number of classes, if the format declares it: all labels in y are below this
            number, and `read` refuses any larger label. None: not declared.
        y_name: the name of y in errors.
        open_groups: how many of the `groups` may be in use at a time, at least 1; the same on all
            ranks.
    """

    repeatable: bool = False
    classes: int | None = None
    y_name: str = "y"
    open_groups: int = 1

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        """Read some samples, in the order given, and check them.

        Args:
            indexes: int [m], each at least 0 and below the number of samples.
            dtype: the float type of the returned x, and of y if y holds floats; None keeps the
                stored type.
            classes: y holds labels, integers from 0 to classes - 1; None: y holds any numbers.
        Returns:
            x [m, …] in `dtype` and y [m, …], int64 or in `dtype`. The caller owns both arrays and
            may change them.
        Raises:
            UserError: a value is not finite or too large for its type, labels are not integers or
                out of range. The message names the data, the sample's index and the value.

        Local.
        """

    def targets(self, indexes: Array) -> Array:
        """Read y of some samples, without x where the data set can do so.

        Returns:
            [m, …], as stored. The caller owns the array and may change it.
        Raises:
            UserError: y cannot be read.

        Local. Cost: x is read too, unless the data set overrides this method.
        """
        parts = range(0, max(len(indexes), 1), TOGETHER)
        y = [self.read(indexes[begin : begin + TOGETHER], dtype=None)[1] for begin in parts]
        return np.concatenate(y)

    def groups(self, indexes: Array) -> Array | None:
        """Return the group of each sample: the samples of a group are best read together.

        A group is, for example, a part of a file that can only be decoded whole. A shuffled epoch
        of a source takes `open_groups` groups at a time. Local.

        Returns:
            int [m], the group number of each sample, from 0; None: samples are read one by one.
        """
        return None

    def __getitem__(self, index: int) -> tuple[Array, Any]:
        """Return sample `index` as (x, y): a data set is a sequence for other libraries."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        x, y = self.read(np.array([index]))
        return x[0], y[0]

    def arrays(
        self, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        """Read all samples into memory, checked, as two arrays; arguments as for `read`. Local."""
        require_memory(repr(self), 8 * len(self))
        return self.read(np.arange(len(self)), dtype=dtype, classes=classes)

    def split(self, test: int | float, *, seed: int = 0) -> tuple[Subset, Subset]:
        """Split off a random test set: (training, test), the same for the same seed.

        Args:
            test: the number of test samples, or (a float) their fraction, rounded.
            seed: an integer of at least 0. The split depends on the seed and the number of samples
                alone.
        Returns:
            Two subsets that read from this data set; nothing is read or copied now.
        Raises:
            UserError: one of the two would be empty.

        Local.
        """
        wanted = samples_to_test(test, len(self))
        stream = (checked_seed(seed), *SPLIT_STREAM)
        require_memory(f"a split of {self!r}", 8 * len(self))
        order = np.random.default_rng(stream).permutation(len(self))
        both = order[wanted:], order[:wanted]
        if self.groups(order[:0]) is not None:  # ascending, so that each group stays together
            both = np.sort(both[0]), np.sort(both[1])
        return Subset(self, both[0]), Subset(self, both[1])


class Arrays(Dataset):
    """Samples in two arrays, in memory or memory-mapped; only the requested rows are read.

    Args:
        x: [n, …], plain numbers. Not changed, not copied.
        y: [n, …], plain numbers: labels, or values of any sign. Not changed, not copied.
        name: prefix of errors, such as the file's name.
    Raises:
        UserError: not arrays of plain numbers, masked values, lengths that differ, or pandas
            indexes that differ.

    `read` raises a UserError if a mapped file was written to or cut since it was opened: accessing
    pages beyond the end of a file would kill the process by a signal. (A cut between this check and
    the reading still does.) A file mapped writable, with mode "r+", is not checked: its owner may
    change the content.

    Pickling, as for a worker of a PyTorch `DataLoader`, sends the places of mapped arrays; the
    worker maps the files again, and raises a UserError if a file has changed.
    """

    repeatable = True

    def __init__(self, x: Any, y: Any, *, name: str = "") -> None:
        before = f"{name}: " if text("name", name) else ""
        self.x_name, self.y_name = f"{before}x", f"{before}y"
        if y is None:
            raise UserError(f"{self.y_name} is missing: every sample needs one")
        require_one_index(before, x, y)
        self.x = as_array(self.x_name, x)
        self.y = as_array(self.y_name, y)
        for array_name, array in ((self.x_name, self.x), (self.y_name, self.y)):
            if array.ndim == 0:
                kind = kind_of(x if array is self.x else y)
                raise UserError(f"{array_name} must have one row for each sample: it is {kind}")
            check_numbers(array_name, array)
        if len(self.x) != len(self.y):
            raise UserError(
                f"{before}x and y must have equal lengths: {len(self.x)} and {len(self.y)}"
            )
        self._find_mapped()

    def _find_mapped(self) -> None:
        mapped = {self.x_name: mapping_of(self.x), self.y_name: mapping_of(self.y)}
        self._mapped = {name: mapping for name, mapping in mapped.items() if mapping is not None}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which maps the files again, if unchanged."""
        state = self.__dict__ | {"_mapped": None}
        for key, name in (("x", self.x_name), ("y", self.y_name)):
            if name in self._mapped:
                state[key] = self._mapped[name].pickled(name, state[key])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for key in ("x", "y"):
            if isinstance(state[key], MappedArray):
                setattr(self, key, state[key].reopened())
        self._find_mapped()

    def __len__(self) -> int:
        return len(self.x)

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        self.require_unchanged()
        kind = float_dtype(dtype)
        x = checked_inputs(self.x_name, np.asarray(self.x[indexes]), indexes, kind)
        y = np.asarray(self.y[indexes])
        return x, checked_targets(self.y_name, y, indexes, kind, classes)

    def targets(self, indexes: Array) -> Array:
        self.require_unchanged()
        return np.asarray(self.y[indexes])

    def require_unchanged(self) -> None:
        """Raise a UserError if a mapped file has changed. Local; about 3 µs a file."""
        for name, mapping in self._mapped.items():
            mapping.require_unchanged(name)

    def __repr__(self) -> str:
        return f"Arrays({self.x_name} {list(self.x.shape)} {self.x.dtype}, y {self.y.dtype})"


class Images(Arrays):
    """Images stored as bytes, and read as floats in 0 to 1.

    Args:
        x: uint8 [n, …], for example [n, channels, height, width]. Not changed, not copied.
        y, name: as for `Arrays`.
    """

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        """Read samples as `Dataset.read` does, but if `dtype` is None, x is float32."""
        real = np.float32 if dtype is None else dtype
        x, y = super().read(indexes, dtype=real, classes=classes)
        x /= LARGEST_BYTE
        return x, y


class Wrapped(Dataset):
    """Base of data sets that change another data set as it is read.

    Args:
        dataset: source of the samples; errors name the place in this data set.
    Raises:
        UserError: an argument is not as required.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = require_dataset("dataset", dataset)
        self.repeatable, self.classes = dataset.repeatable, dataset.classes
        self.y_name, self.open_groups = dataset.y_name, dataset.open_groups

    def __len__(self) -> int:
        return len(self.dataset)

    def targets(self, indexes: Array) -> Array:
        return self.dataset.targets(indexes)

    def groups(self, indexes: Array) -> Array | None:
        return self.dataset.groups(indexes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r})"


class Subset(Wrapped):
    """Some samples of another data set, in a given order.

    Args:
        dataset: source of the samples; errors name the index in this data set.
        indexes: int [m], the samples to take.
    Raises:
        UserError: an argument is not as required.
    """

    def __init__(self, dataset: Dataset, indexes: Array) -> None:
        super().__init__(dataset)
        self.indexes = as_array("indexes", indexes)
        if self.indexes.dtype.kind not in "iu" or self.indexes.ndim != 1:
            raise UserError(f"indexes={shown(indexes)} must be whole numbers [m]")

    def __len__(self) -> int:
        return len(self.indexes)

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        return self.dataset.read(self.indexes[indexes], dtype=dtype, classes=classes)

    def targets(self, indexes: Array) -> Array:
        return self.dataset.targets(self.indexes[indexes])

    def groups(self, indexes: Array) -> Array | None:
        return self.dataset.groups(self.indexes[indexes])

    def __repr__(self) -> str:
        return f"Subset({len(self)} samples of {self.dataset!r})"


class Flattened(Wrapped):
    """Another data set with each input flattened to one row: x [m, 8, 8] becomes [m, 64]."""

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        x, y = self.dataset.read(indexes, dtype=dtype, classes=classes)
        return x.reshape(len(x), math.prod(x.shape[1:])), y


def flattened(dataset: Dataset) -> Dataset:
    """Return a data set whose x is [m, inputs], as models need it, whatever its shape was. Local.

    >>> flattened(Arrays(np.zeros((9, 8, 8)), np.zeros(9, int))).read(np.arange(3))[0].shape
    (3, 64)
    """
    return Flattened(dataset)


def require_dataset(name: str, data: Any) -> Dataset:
    """Check that a data set is given, and return it. Local.

    Raises:
        UserError: `data` is not a `Dataset`.
    """
    dataset: Dataset = instance(name, data, Dataset, "data.Arrays(x, y) or data.load(path)")
    return dataset


def samples_to_test(test: int | float, samples: int) -> int:
    """Return the number of test samples, given a number or (a float) a fraction. Local.

    Raises:
        UserError: the training or the test part would be empty.
    """
    if isinstance(test, float):
        wanted = round(test * samples) if 0 < test < 1 else 0
    else:
        wanted = integer("test", test, 0)
    if not 0 < wanted < samples:
        raise UserError(f"test={test!r} must leave at least one of {samples} samples in each part")
    return wanted
