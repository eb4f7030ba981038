"""CIFAR-10 and CIFAR-100 in their binary version: records of labels and 3 · 32 · 32 bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import UserError
from ...validation import checked_path, choice
from ..dataset import Dataset, Images
from ..joined import Joined
from ..mapping import mapped_file
from ..validation import Array, DType

SHAPE = (3, 32, 32)  #: red, green, blue; rows from the top
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Variant:
    """File names and labels of CIFAR-10 or CIFAR-100.

    Attributes:
        name: of the data set, for errors.
        train, test: names of its files.
        labels: the label bytes before the pixels, by name, with the number of classes of each.
    """

    name: str
    train: tuple[str, ...]
    test: str
    labels: dict[str, int]


CIFAR10 = Variant(
    "CIFAR-10", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", {"label": 10}
)
CIFAR100 = Variant("CIFAR-100", ("train.bin",), "test.bin", {"coarse": 20, "fine": 100})


class CifarFile(Images):
    """The images of one file in CIFAR's binary version: x [n, 3, 32, 32] in 0 to 1, y [n].

    Args:
        path: a file of records. A record is a label (CIFAR-10), or a coarse and a fine label
            (CIFAR-100), and 3,072 bytes: all red values row by row, then green, then blue.
        variant: `CIFAR10` or `CIFAR100`.
        label: name of the label to use as y; None: the last label.
    Raises:
        UserError: the file is missing, not readable or no regular file, or does not consist of
            whole records.

    Memory-mapped: only the requested records are read. A label out of range is refused when it is
    read. Local.
    """

    def __init__(
        self, path: str | os.PathLike[str], variant: Variant = CIFAR10, label: str | None = None
    ) -> None:
        names = list(variant.labels)
        chosen = names[-1] if label is None else choice("label", label, names)
        length = len(names) + PIXELS
        place = checked_path("path", path, "file")
        content = mapped_file(place)
        whole, rest = divmod(len(content), length)
        if rest or not whole:
            where = f"record {whole} has {rest}" if rest else "it has none"
            raise UserError(
                f"{place} must be records of {length:,} bytes, as in {variant.name}: {where}"
            )
        records = content.reshape(whole, length)
        x = records[:, len(names) :].reshape(whole, *SHAPE)
        super().__init__(x, records[:, names.index(chosen)], name=str(place))
        self.classes = variant.labels[chosen]

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        assert self.classes is not None
        few = self.classes if classes is None else min(classes, self.classes)
        return super().read(indexes, dtype=dtype, classes=few)


def cifar10(folder: str | os.PathLike[str]) -> tuple[Dataset, Dataset]:
    """Open CIFAR-10, 60,000 photographs of 10 classes, 32 by 32 in colour, as (training, test).

    Args:
        folder: contains the files of the binary version, ``data_batch_1.bin`` to
            ``data_batch_5.bin`` and ``test_batch.bin``, of any number of records.
    Returns:
        Two data sets with x float32 [n, 3, 32, 32] in 0 to 1 and y int64 [n] from 0 to 9.
        Memory-mapped: only the requested records are read.
    Raises:
        UserError: a file is missing or does not consist of whole records. While reading: a label is
            out of range.

    Local. Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009;
    https://www.cs.toronto.edu/~kriz/cifar.html
    """
    return _both(folder, CIFAR10, None)


def cifar100(folder: str | os.PathLike[str], *, label: str = "fine") -> tuple[Dataset, Dataset]:
    """Open CIFAR-100 as (training, test), from ``train.bin`` and ``test.bin`` in a folder.

    Args:
        folder: contains the two files of the binary version.
        label: "fine" for y from 0 to 99, "coarse" for y from 0 to 19.
    Returns, Raises: as for `cifar10`. Local.
    """
    return _both(folder, CIFAR100, label)


def load_cifar10(path: str | os.PathLike[str]) -> Dataset:
    """Open a file of CIFAR-10 (`CifarFile`), or the training files in a folder. Local."""
    return _file_or_training(path, CIFAR10, None)


def load_cifar100(path: str | os.PathLike[str], *, label: str = "fine") -> Dataset:
    """Open a file of CIFAR-100 (`CifarFile`), or the training file in a folder. Local."""
    return _file_or_training(path, CIFAR100, label)


def has_cifar_test(variant: Variant, path: Path) -> bool:
    """Return True if a folder has a test file, and not only files to train on. Local."""
    return (path / variant.test).is_file()


def is_cifar(variant: Variant, path: Path) -> bool:
    """Return True if a folder has all files of a data set. Local.

    For CIFAR-10 also True for a file named like one of its files.
    """
    names = (*variant.train, variant.test)
    if path.is_dir():
        return all((path / name).is_file() for name in names)
    return path.name in names and variant is CIFAR10  # "test.bin" is too common a name


def _both(
    folder: str | os.PathLike[str], variant: Variant, label: str | None
) -> tuple[Dataset, Dataset]:
    place = checked_path("folder", folder)
    return _training(place, variant, label), CifarFile(place / variant.test, variant, label)


def _file_or_training(path: str | os.PathLike[str], variant: Variant, label: str | None) -> Dataset:
    place = checked_path("path", path, "file")
    return _training(place, variant, label) if place.is_dir() else CifarFile(path, variant, label)


def _training(folder: Path, variant: Variant, label: str | None) -> Dataset:
    files = [CifarFile(folder / name, variant, label) for name in variant.train]
    return Joined(files, name=f"{variant.name} of {folder}") if files[1:] else files[0]
