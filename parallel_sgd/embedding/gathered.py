"""Pushes of rows that wait for the workers' common step.

The step sums the pushes by id, in the order of the workers, so that every run has the same sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import row_kernels

Array = npt.NDArray[Any]
Contents = dict[str, Array]


class GatheredRows:
    """The pushes to a server's part of a table since the last step. Local.

    Args:
        width: number of values in a row.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._pushes: dict[int, list[tuple[Array, Array]]] = {}  # by worker, in order of arrival

    def add(self, worker: int, ids: Array, gradient: Array) -> None:
        """Store a copy of a push.

        Args:
            worker: number of the worker.
            ids: int64 [m].
            gradient: float32 [m, width].
        """
        self._pushes.setdefault(worker, []).append((ids.copy(), gradient.copy()))

    def take(self, weights: Mapping[int, float]) -> tuple[Array, Array]:
        """Sum all pushes by id, and remove them.

            total[id] = ((w_0 g_0[id] + w_1 g_1[id]) + w_2 g_2[id]) + ...

        Args:
            weights: of each worker in the step. Pushes of workers that have left without a step are
                dropped.
        Returns:
            The distinct ids, int64 [u], and their summed gradients, float32 [u, width].
        """
        ids, gradients = [np.empty(0, np.int64)], [np.empty((0, self._width), np.float32)]
        for worker in sorted(weights.keys() & self._pushes.keys()):
            weight = np.float32(weights[worker])
            for pushed, gradient in self._pushes[worker]:
                ids.append(pushed)
                gradients.append(gradient if weight == 1 else gradient * weight)
        self._pushes = {}
        kernels = row_kernels()
        distinct, inverse = kernels.unique(np.concatenate(ids))
        total = np.empty((len(distinct), self._width), np.float32)
        kernels.sum_rows(inverse, np.concatenate(gradients), total)
        return distinct, total

    def renumber(self, workers: Mapping[int, int]) -> None:
        """Keep the pushes of the given workers, under their new numbers.

        Args:
            workers: new number by previous number.
        """
        self._pushes = {new: self._pushes[k] for k, new in workers.items() if k in self._pushes}

    def contents(self) -> Contents:
        """Return copies for a checkpoint.

        Returns:
            "gathered_ids", "gathered_workers" int64 [m] and "gathered_gradient" float32 [m, width],
            sorted by worker, then in the order of the pushes.
        """
        every = [(k, *push) for k, pushes in sorted(self._pushes.items()) for push in pushes]
        ids = [np.empty(0, np.int64), *(ids for _, ids, _ in every)]
        workers = [np.empty(0, np.int64), *(np.full(len(ids), k) for k, ids, _ in every)]
        empty = np.empty((0, self._width), np.float32)
        gradients = [empty, *(gradient for *_, gradient in every)]
        return {
            "gathered_ids": np.concatenate(ids),
            "gathered_workers": np.concatenate(workers),
            "gathered_gradient": np.concatenate(gradients),
        }

    def load(
        self, contents: Mapping[str, Array], keep: Callable[[Array], Array], workers: int
    ) -> None:
        """Load this server's share of saved `contents`, if present.

        Args:
            contents: of a table of the same width, from any server.
            keep: maps ids int64 [k] to a boolean [k]: True for this server's ids.
            workers: present number of workers. Worker k of the saved run becomes k modulo this
                number.
        """
        if "gathered_ids" not in contents:
            return
        ids = np.ascontiguousarray(contents["gathered_ids"], np.int64)
        mine = np.flatnonzero(keep(ids))
        ids, pushed_by = ids[mine], contents["gathered_workers"][mine]
        gradient = contents["gathered_gradient"][mine]
        for worker in np.unique(pushed_by).tolist():
            indices = np.flatnonzero(pushed_by == worker)
            self.add(worker % workers, ids[indices], gradient[indices])
