"""Images stored as bytes, in a quarter of the memory of float32."""

from __future__ import annotations

import numpy as np

from ..dataset import Arrays
from ..validation import Array, DType

LARGEST_BYTE = 255


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
