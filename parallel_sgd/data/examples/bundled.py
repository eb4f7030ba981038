"""Small real data sets found on the machine, without a download: digits and Fashion-MNIST."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ...validation import checked_path
from ..dataset import Arrays, Images
from ..readers.idx import load_idx

FILE = "datasets/data/digits.csv.gz"  #: path within scikit-learn
DIGITS_CLASSES = 10
LARGEST_PIXEL = 16

#: Folder of Debian's package dataset-fashion-mnist.
FASHION_MNIST_FOLDER = "/usr/share/datasets/fashion-mnist"
FASHION_MNIST_CLASSES = 10


def digits(*, test: int | float = 360, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Load scikit-learn's handwritten digits, 1797 images of 8 by 8, as (training, test).

    Args:
        test: the number of test images, or (a float) their fraction.
        seed: decides the test images; an integer of at least 0.
    Returns:
        Two data sets with x float32 [n, 64] in 0 to 1 and y int64 [n] from 0 to 9.
    Raises:
        UserError: scikit-learn is not installed, or `test` is out of range.

    Local.
    """
    table = _table()
    x, y = table[:, :-1], table[:, -1].astype(np.int64)
    scaled = (x / LARGEST_PIXEL).astype(np.float32)
    training, testing = Arrays(scaled, y, name="digits").split(test, seed=seed)
    return Arrays(*training.arrays(), name="digits"), Arrays(*testing.arrays(), name="digits")


def fashion_mnist(folder: str | os.PathLike[str] | None = None) -> tuple[Images, Images]:
    """Load Fashion-MNIST, 70,000 grey images of clothing, 28 by 28, as (training, test).

    Args:
        folder: contains the four files as published, or without their ``.gz``. The files of MNIST
            have the same names and sizes, and are read, too. None: the folder of Debian's package
            dataset-fashion-mnist.
    Returns:
        Two data sets with x float32 [n, 1, 28, 28] in 0 to 1 and y int64 [n] from 0 to 9: 60,000
        and 10,000 images. Memory: 55 MB of bytes, converted to floats as they are read.
    Raises:
        UserError: a file is missing, malformed, or does not hold such images or labels.

    Local. Cost: every rank reads the files, in half a second. Source: Xiao, Rasul, Vollgraf,
    "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms", 2017.
    """
    if folder is None:
        place = Path(FASHION_MNIST_FOLDER)
        if not place.is_dir():
            raise UserError(
                f"Fashion-MNIST is not in {place}: apt install dataset-fashion-mnist, or give a "
                "folder with the four files, train-images-idx3-ubyte.gz and so on"
            )
    else:
        place = checked_path("folder", folder)
    return _images(place, "train"), _images(place, "t10k")


def is_mnist(path: Path) -> bool:
    """Return True if a folder has files named as in MNIST and Fashion-MNIST. Local."""
    return _plain_or_gz(path / "train-images-idx3-ubyte").is_file()


def _images(folder: Path, part: str) -> Images:
    image_file = _plain_or_gz(folder / f"{part}-images-idx3-ubyte")
    label_file = _plain_or_gz(folder / f"{part}-labels-idx1-ubyte")
    x, y = load_idx(image_file), load_idx(label_file)
    if x.dtype != np.uint8 or x.shape[1:] != (28, 28):
        raise UserError(
            f"{image_file} must hold ubyte images [n, 28, 28]: it holds {x.dtype} {list(x.shape)}"
        )
    if y.dtype != np.uint8 or y.ndim != 1 or (y >= FASHION_MNIST_CLASSES).any():
        raise UserError(
            f"{label_file} must hold ubyte labels [n] from 0 to {FASHION_MNIST_CLASSES - 1}: it "
            f"holds {y.dtype} {list(y.shape)}, at most {y.max(initial=0)}"
        )
    return Images(x[:, np.newaxis], y, name=str(image_file))


def _plain_or_gz(path: Path) -> Path:
    return path if path.is_file() else path.with_name(f"{path.name}.gz")


def _table() -> npt.NDArray[Any]:
    """Return pixels and class of every image, [1797, 65].

    Reads scikit-learn's file directly: importing scikit-learn takes a second on every rank.
    """
    library = find_spec("sklearn")
    if library is None or library.origin is None:
        raise UserError(
            "digits need scikit-learn, which is not installed: pip install '.[train]' from the "
            "checkout"
        )
    file = Path(library.origin).parent / FILE
    if file.is_file():
        return np.loadtxt(file, delimiter=",", dtype=np.uint8)  # faster than reading floats
    from sklearn.datasets import load_digits  # a version with the file elsewhere

    x, y = load_digits(return_X_y=True)
    return np.column_stack([x, y])
