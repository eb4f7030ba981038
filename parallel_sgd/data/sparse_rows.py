"""Sparse rows: rows stored by their few non-zero numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..validation import require_memory
from .order import IndexArray
from .validation import Array


class SparseRows(NamedTuple):
    """The rows of a minibatch as their non-zero numbers: compressed sparse rows (CSR).

    ``scipy.sparse.csr_array((rows.values, rows.columns, rows.begins), rows.shape)`` converts the
    rows to SciPy, and ``torch.sparse_csr_tensor(begins, columns, values, shape)`` to PyTorch.

    Attributes:
        begins: int64 [m + 1]. Row i is the range begins[i] to begins[i + 1] of `columns` and
            `values`.
        columns: int64 [numbers], ascending in each row, from 0.
        values: float [numbers].
        shape: (m, features).
    """

    begins: IndexArray
    columns: IndexArray
    values: Array
    shape: tuple[int, int]

    def dense(self) -> Array:
        """Return all numbers, [m, features]. Local.

        Raises:
            UserError: the array would not fit into memory.
        """
        require_memory(f"x {list(self.shape)}", self.shape[0] * self.shape[1] * 8)
        x = np.zeros(self.shape, self.values.dtype)
        x[np.repeat(np.arange(self.shape[0]), np.diff(self.begins)), self.columns] = self.values
        return x
