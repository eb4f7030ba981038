"""Rows of which few numbers are not 0."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..validation import require_memory
from .order import IndexArray
from .validation import Array


class SparseRows(NamedTuple):
    """The rows of a minibatch, each as its numbers that are not 0: compressed sparse rows (CSR).

    ``scipy.sparse.csr_array((rows.values, rows.columns, rows.begins), rows.shape)`` is such an
    array, and so is ``torch.sparse_csr_tensor(begins, columns, values, shape)``.

    Attributes:
        begins: int64 [m + 1], where in the other two each row begins, and the last one ends.
        columns: int64 [numbers], ascending in each row, from 0.
        values: float [numbers].
        shape: (m, features).
    """

    begins: IndexArray
    columns: IndexArray
    values: Array
    shape: tuple[int, int]

    def dense(self) -> Array:
        """All numbers, [m, features]."""
        require_memory(f"x {list(self.shape)}", self.shape[0] * self.shape[1] * 8)
        x = np.zeros(self.shape, self.values.dtype)
        x[np.repeat(np.arange(self.shape[0]), np.diff(self.begins)), self.columns] = self.values
        return x
