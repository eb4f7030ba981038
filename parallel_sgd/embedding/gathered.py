"""Pushes of rows that wait for the step of all workers: then they are summed by id, in the order of
the workers, so that the sum is the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels import row_kernels

Array = npt.NDArray[Any]
Contents = dict[str, Array]


class GatheredRows:
    """What workers have pushed to one server's part of a table since the last step. Local.

    Args:
        width: values in a row.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._pushes: dict[int, list[tuple[Array, Array]]] = {}  # by worker, in their order

    def add(self, worker: int, ids: Array, gradient: Array) -> None:
        """Keep a copy of a push.

        Args:
            worker: its number.
            ids: int64 [m].
            gradient: float32 [m, width].
        """
        self._pushes.setdefault(worker, []).append((ids.copy(), gradient.copy()))

    def take(self, weights: Mapping[int, float]) -> tuple[Array, Array]:
        """The different ids, int64 [u], and the sum of their gradients, float32 [u, width]; nothing
        is left.

            total[id] = ((w_0 g_0[id] + w_1 g_1[id]) + w_2 g_2[id]) + ...

        Args:
            weights: of the workers that take part in the step; what others have pushed, who have
                left without one, is dropped.
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
        """Keep the pushes of these workers, by their new numbers."""
        self._pushes = {new: self._pushes[k] for k, new in workers.items() if k in self._pushes}

    def contents(self) -> Contents:
        """Copies for a checkpoint.

        Returns:
            "gathered_ids", "gathered_workers" int64 [m] and "gathered_gradient" float32 [m, width],
            each worker's in the order of its pushes.
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
        """Take up what is this server's of another's `contents`, if they have any.

        Args:
            contents: of a table of the same width.
            keep: given ids int64 [k], a boolean [k]: which to take.
            workers: that there are now: number k goes to k modulo their number.
        """
        if "gathered_ids" not in contents:
            return
        ids = np.ascontiguousarray(contents["gathered_ids"], np.int64)
        mine = np.flatnonzero(keep(ids))
        ids, pushed_by = ids[mine], contents["gathered_workers"][mine]
        gradient = contents["gathered_gradient"][mine]
        for worker in np.unique(pushed_by).tolist():
            its = np.flatnonzero(pushed_by == worker)
            self.add(worker % workers, ids[its], gradient[its])
