"""Images of bytes, which take a quarter of the memory that floats would."""

from __future__ import annotations

import numpy as np

from ..dataset import Arrays
from ..validation import Array, DType

LARGEST_BYTE = 255


class Images(Arrays):
    """Images kept as bytes, and read as floats in 0 to 1.

    Args:
        x: uint8 [n, …], say [n, channels, height, width]. Not changed, not copied.
        y: as for `Arrays`, like `name`.
    """

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        """As `Dataset.read`, with floats also where `dtype` is None: float32 then."""
        real = np.float32 if dtype is None else dtype
        x, y = super().read(indexes, dtype=real, classes=classes)
        x /= LARGEST_BYTE
        return x, y
