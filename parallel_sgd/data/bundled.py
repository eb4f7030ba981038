"""Real data that need no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .dataset import Arrays

FILE = "datasets/data/digits.csv.gz"  #: within scikit-learn
DIGITS_CLASSES = 10
LARGEST_PIXEL = 16


def digits(*, test: int | float = 360, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Scikit-learn's handwritten digits, 1797 images of 8 by 8, as (training, test).

    Args:
        test: how many images to test on, or (a float) which fraction of them.
        seed: decides which; an integer of at least 0.
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


def _table() -> npt.NDArray[np.float64]:
    """Pixels and class of every image, [1797, 65].

    They are read from scikit-learn's own file: importing it takes a second on every rank.
    """
    library = find_spec("sklearn")
    if library is None or library.origin is None:
        raise UserError(
            "digits need scikit-learn, which is not installed: pip install 'parallel-sgd[train]'"
        )
    file = Path(library.origin).parent / FILE
    if file.is_file():
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # of a version that keeps them elsewhere

    x, y = load_digits(return_X_y=True)
    return np.column_stack([x, y])
