"""Real data that need no download."""

from __future__ import annotations

import importlib

import numpy as np

from ..errors import UserError
from .dataset import Arrays

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
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise UserError(
            "digits need scikit-learn, which is not installed: pip install 'parallel-sgd[train]'"
        ) from None
    x, y = datasets.load_digits(return_X_y=True)
    scaled = (x / LARGEST_PIXEL).astype(np.float32)
    training, testing = Arrays(scaled, y, name="digits").split(test, seed=seed)
    return Arrays(*training.arrays(), name="digits"), Arrays(*testing.arrays(), name="digits")
