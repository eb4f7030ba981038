"""A worker's side of an embedding table: rows by ids, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..kernels import row_kernels
from ..validation import integer, shown
from .options import Embedding
from .tables import COUNTS

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Result = TypeVar("Result")

MOST_SAMPLES = 2**53 - 1  #: of one push


class RowServers(Protocol):
    """Those who hold the rows of all tables, as one worker asks them. Local.

    Ids and rows are sorted by the servers that hold them: those of server s are from `starts[s]` to
    `starts[s + 1]`. Tables go by their numbers, from 0.
    """

    @property
    def count(self) -> int:
        """How many servers there are."""
        ...

    def in_turn(self, work: Callable[[], Result]) -> Result:
        """Do something that pulls or pushes, after all that was begun before."""
        ...

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        """The same in the background."""
        ...

    def pull(self, table: int, ids: Ids, starts: Sequence[int], out: Rows) -> None:
        """Write the rows of ids, int64 [u], into `out`, float32 [u, width]; within `work` alone."""
        ...

    def push(
        self, table: int, ids: Ids, starts: Sequence[int], gradient: Rows, samples: int
    ) -> None:
        """Have rows trained by `gradient`, float32 [u, width]; within `work` alone."""
        ...

    def counts(self) -> npt.NDArray[np.int64]:
        """[tables, 4], the sums over the servers of their `ServedTables.counts`."""
        ...


@dataclass
class _Spread:
    """Different ids, sorted by the servers that hold them.

    Attributes:
        ids: int64 [u]; those of server s from `starts[s]` to `starts[s + 1]`.
        inverse: int32 [m], where each of the ids that were asked for is in them.
    """

    ids: Ids
    starts: list[int]
    inverse: npt.NDArray[np.int32]


class RemoteTable:
    """The rows of a distributed embedding table (`Embedding`): of int64 ids, float32 [width] each.

    Only the different ones of the ids travel, and the sum of their gradients. A row exists from its
    first push on; before, it has its initial values, which depend on the table's seed and the id.
    Rows are trained as they are pushed, whatever the mode of the model is.

    Args:
        options: of the table.
        number: of the table, from 0.
        servers: as this worker asks them, made at the first use; None on a rank that is no worker.

    Local. Cost: for each server that holds some of the rows, a message and an answer.
    """

    def __init__(
        self, options: Embedding, number: int, servers: Callable[[], RowServers] | None
    ) -> None:
        self.options, self._number, self._servers = options, number, servers
        self._kernels = row_kernels()
        self._coming: tuple[Ids, Future[Rows]] | None = None

    @property
    def width(self) -> int:
        """Values in a row."""
        return self.options.width

    def rows(self, ids: Ids) -> Rows:
        """The rows of ids.

        Args:
            ids: int64 [...], at least 0, each as often as you like.
        Returns:
            float32 [..., width], the caller's own; those that were prefetched, where `prefetch` was
            last called with these ids.
        Raises:
            UserError: ids that are not possible.
        """
        flat = self._checked(ids)
        coming, self._coming = self._coming, None
        servers = self._asked()
        if coming is not None:
            rows = coming[1].result()
            if np.array_equal(coming[0], flat):
                return rows.reshape(*ids.shape, self.width)
        return servers.in_turn(lambda: self._pull(servers, flat)).reshape(*ids.shape, self.width)

    def prefetch(self, ids: Ids) -> None:
        """Begin to pull, in the background, what the next `rows` will ask for.

        Args:
            ids: as for `rows`; copied.
        """
        flat, servers = self._checked(ids).copy(), self._asked()
        self._coming = flat, servers.begin(lambda: self._pull(servers, flat))

    def forget_prefetched(self) -> None:
        """The next `rows` are pulled anew: a checkpoint has taken the place of all."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming[1].result()

    def push(self, ids: Ids, gradient: Rows, samples: int) -> None:
        """Have rows trained by the table's optimizer.

        Args:
            ids: int64 [...], at least 0; the gradients of one that occurs several times are summed.
            gradient: float32 [..., width], summed over the samples; not changed.
            samples: that it is of, at least 1.
        Raises:
            UserError: ids or a gradient that are not possible, or not finite.
        """
        flat, servers = self._checked(ids), self._asked()
        samples, name = integer("samples", samples, 1, MOST_SAMPLES), self.options.name
        if not isinstance(gradient, np.ndarray):
            kind = type(gradient).__name__
            raise UserError(f"gradient of table {name!r} must be a NumPy array, not {kind}")
        if gradient.shape != (*ids.shape, self.width) or gradient.dtype != np.float32:
            raise UserError(
                f"gradient{list(gradient.shape)} of {gradient.dtype} for rows of table "
                f"{name!r} must be float32{[*ids.shape, self.width]}"
            )
        rows = np.ascontiguousarray(gradient).reshape(-1, self.width)
        servers.in_turn(lambda: self._push(servers, flat, rows, samples))

    def counts(self) -> dict[str, int]:
        """How many rows the servers hold, the bytes of memory that they take, the ids that have
        been pushed but have no row yet, and the rows that were forgotten."""
        return dict(zip(COUNTS, self._asked().counts()[self._number].tolist(), strict=True))

    def _asked(self) -> RowServers:
        if self._servers is None:
            raise UserError(
                f"table {self.options.name!r}: a rank that only serves cannot ask for rows"
            )
        return self._servers()

    def _checked(self, ids: Any) -> Ids:
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64:
            kind = f"an array of {ids.dtype}" if isinstance(ids, np.ndarray) else type(ids).__name__
            raise UserError(
                f"ids of table {self.options.name!r} must be a NumPy array of int64, not {kind}"
            )
        flat: Ids = np.ascontiguousarray(ids).reshape(-1)
        if flat.size and flat.min() < 0:
            at = int(np.argmax(flat < 0))
            raise UserError(
                f"ids of table {self.options.name!r} must be at least 0: number {at} is {flat[at]}"
            )
        return flat

    def _spread(self, servers: int, ids: Ids) -> _Spread:
        distinct, inverse = self._kernels.unique(ids)
        if servers == 1:
            return _Spread(distinct, [0, len(distinct)], inverse)
        order, starts = self._kernels.partition(distinct, servers)
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        return _Spread(distinct[order], starts.tolist(), place[inverse])

    def _pull(self, servers: RowServers, ids: Ids) -> Rows:
        spread = self._spread(servers.count, ids)
        rows = np.empty((len(spread.ids), self.width), np.float32)
        servers.pull(self._number, spread.ids, spread.starts, rows)
        out = np.empty((len(ids), self.width), np.float32)
        self._kernels.take_rows(rows, spread.inverse, out)
        return out

    def _push(self, servers: RowServers, ids: Ids, gradient: Rows, samples: int) -> None:
        spread = self._spread(servers.count, ids)
        total = np.empty((len(spread.ids), self.width), np.float32)
        self._kernels.sum_rows(spread.inverse, gradient, total)
        # One server can refuse it by itself; of several, others might have taken their parts.
        if servers.count > 1 and not np.isfinite(total).all():
            raise UserError(f"the gradient of rows of table {self.options.name!r} is not finite")
        servers.push(self._number, spread.ids, spread.starts, total, samples)


class RemoteTables(dict[str, RemoteTable]):
    """The tables by name; one that is not there is a mistake of the user's."""

    def __missing__(self, name: Any) -> RemoteTable:
        known = ", ".join(map(repr, self)) or "none (DataParallelASGD(tables=...) makes them)"
        raise UserError(f"tables[{shown(name)}] is not known; there are {known}")
