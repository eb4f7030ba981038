"""Resharding: a checkpoint of K ranks, converted for a different number of ranks by the reshard
rules of `parallel_sgd.state`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...array_files import StoredArray
from ...errors import UserError
from ...state import Weight, parts_of
from .state_tree import HostArray, Tree, is_state, state_fields
from .stateful import Stateful

Read = Callable[[int, str], StoredArray]  #: opens an array of an old rank, by name

PIECE = 1 << 18  #: values accumulated at a time


def stripe_sizes(learner: Stateful) -> dict[str, int]:
    """Return the number of values in each of this rank's stripes, by field. Local."""
    return {
        where: len(value)
        for where, rule, value in leaves(learner.state, "algorithm")
        if rule == "stripe" and value is not None
    }


def reshard(
    learner: Stateful,
    saved: Sequence[Tree],
    weights: Sequence[Weight],
    sizes: Sequence[Mapping[str, int]],
    read: Read,
) -> Tree:
    """Return the state tree of a new rank, computed from the trees of all old ranks.

    Args:
        learner: new; its fields have the rules. Not changed.
        saved: flattened trees of the old ranks.
        weights: the weight of each old rank's model in a mean: see `state.across`.
        sizes: `stripe_sizes` of all new ranks.
        read: opens a stored array.
    Returns:
        A tree for `state_tree.restore`.
    Raises:
        UserError: a field has no reshard rule, or its saved values do not fit the rule.

    Local. Cost: reads the model of every old rank; accumulates in float64, by pieces. Memory: the
    new tree, and some pieces.
    """
    return _Resharding(learner, weights, sizes, read).tree(saved)


class _Resharding:
    def __init__(
        self,
        learner: Stateful,
        weights: Sequence[Weight],
        sizes: Sequence[Mapping[str, int]],
        read: Read,
    ) -> None:
        self.learner, self.sizes, self.read = learner, sizes, read
        self.rank, self.size = learner.comm.rank, learner.comm.size
        self.weights = list(weights)

    def tree(self, saved: Sequence[Tree]) -> Tree:
        return {"parameters": self._mean([tree["parameters"] for tree in saved])} | {
            name: self._walk(state, [tree[name] for tree in saved], name)
            for name, state in self.learner.states.items()
        }

    def _walk(
        self,
        live: Any,
        saved: list[Any],
        where: str,
        rule: str | None = None,
        *,
        is_open: bool = False,
    ) -> Any:
        if is_state(live) and isinstance(saved[0], dict):
            return {
                f.name: self._walk(
                    getattr(live, f.name),
                    [value[f.name] for value in saved],
                    f"{where}.{f.name}",
                    f.metadata.get("across"),
                    is_open=bool(f.metadata.get("open")),
                )
                for f in state_fields(live)
            }
        if isinstance(saved[0], dict):
            live = live if isinstance(live, dict) else {}
            for rank, value in enumerate([] if is_open else saved):
                if value.keys() != saved[0].keys():
                    odd = sorted(value.keys() ^ saved[0].keys())[0]
                    raise UserError(f"has {where}.{odd} on only one of the ranks 0 and {rank}")
            names = dict.fromkeys(name for value in saved for name in value)
            return {
                name: self._walk(
                    live.get(name),
                    [value.get(name) for value in saved],
                    f"{where}.{name}",
                    rule,
                    is_open=is_open,
                )
                for name in names
            }
        if all(value is None for value in saved):
            return None
        resharded = getattr(self, f"_{rule}", None) if rule else None
        may_lack = ("same", "sum", "drop", *(["mean"] if is_open else []))
        lacking = any(value is None for value in saved) and rule not in may_lack
        if resharded is None or lacking:
            raise UserError(
                f"{where} does not declare its meaning on another number of ranks "
                "(parallel_sgd.state.across)"
            )
        if rule in ("mean", "sum"):
            self._require_one_shape(saved, where)
        return resharded(saved, where) if rule == "stripe" else resharded(saved)

    def _require_one_shape(self, saved: list[Any], where: str) -> None:
        """Check that the arrays to be added up have one shape."""
        arrays = {rank: value for rank, value in enumerate(saved) if value is not None}
        shapes = {
            rank: list(self.read(rank, value[0]).shape) if isinstance(value, list) else None
            for rank, value in arrays.items()
        }
        first = next(iter(shapes))
        for rank, shape in shapes.items():
            if shape != shapes[first]:
                raise UserError(
                    f"has {where} of {shapes[first]} on rank {first}, but {shape} on rank {rank}"
                )

    def _same(self, saved: list[Any]) -> Any:
        rank, first = next((k, value) for k, value in enumerate(saved) if value is not None)
        return self.read(rank, first[0]).whole() if isinstance(first, list) else first

    def _drop(self, saved: list[Any]) -> None:
        return None

    def _most(self, saved: list[Any]) -> Any:
        return max(saved)

    def _share(self, saved: list[Any]) -> int:
        total = sum(saved)
        return int(total // self.size + (self.rank < total % self.size))

    def _mean(self, saved: list[Any]) -> Any:
        having = [rank for rank, value in enumerate(saved) if value is not None]
        if not isinstance(saved[having[0]], list):
            values = [np.array(saved[rank], np.float64) for rank in having]
            equal = all(np.array_equal(value, values[0], equal_nan=True) for value in values)
            ((_, weights),) = self._parts(having, 1)
            return saved[having[0]] if equal else float(_weighted(values, weights))
        arrays = [self.read(rank, saved[rank][0]) for rank in having]
        if any(array.shape != arrays[0].shape for array in arrays):
            shapes = sorted({str(list(array.shape)) for array in arrays})
            raise UserError(f"has {saved[having[0]][0]} of {' and of '.join(shapes)} on its ranks")
        out, equal = np.empty(arrays[0].shape, arrays[0].dtype), True
        begin_of_part = 0
        for end_of_part, weights in self._parts(having, out.shape[0] if out.ndim else 1):
            for begin, end in _pieces(out, begin_of_part, end_of_part):
                values = [_read(array, begin, end) for array in arrays]
                equal = equal and all(
                    np.array_equal(value, values[0], equal_nan=True) for value in values
                )
                _rows(out, begin, end)[...] = _weighted(values, weights)
            begin_of_part = end_of_part
        if equal:
            for begin, end in _pieces(out):
                _rows(out, begin, end)[...] = _read(arrays[0], begin, end)
        return out

    def _parts(self, ranks: Sequence[int], rows: int) -> list[tuple[int, HostArray]]:
        """Return the end of each part of an array, and its weights on these old ranks.

        Args:
            rows: the length of the array's first axis.
        """
        of_ranks = [parts_of(self.weights[rank], rows) for rank in ranks]
        if any(parts.keys() != of_ranks[0].keys() for parts in of_ranks):
            raise UserError("has weights of different parts of the model on its ranks")
        parts = []
        for end in of_ranks[0]:
            weights = np.array([parts[end] for parts in of_ranks], np.float64)
            parts.append((end, weights if weights.any() else weights + 1))
        return parts

    def _sum(self, saved: list[Any]) -> Any:
        """Return the sum over the old ranks rank, rank + size, ...; zeros if these have no
        values."""
        mine = [rank for rank in range(self.rank, len(saved), self.size) if saved[rank] is not None]
        some = next(rank for rank, value in enumerate(saved) if value is not None)
        if not isinstance(saved[some], list):
            return sum(saved[rank] for rank in mine)
        first = self.read(some, saved[some][0])
        arrays = [self.read(rank, saved[rank][0]) for rank in mine]
        out = np.empty(first.shape, first.dtype)
        for begin, end in _pieces(out):
            total = np.zeros(np.shape(_rows(out, begin, end)))
            for array in arrays:
                total += _read(array, begin, end)
            _rows(out, begin, end)[...] = total
        return out

    def _stripe(self, saved: list[Any], where: str) -> HostArray:
        arrays = [self.read(rank, value[0]) for rank, value in enumerate(saved)]
        sizes = [sizes.get(where, 0) for sizes in self.sizes]
        ends = list(accumulate(array.shape[0] for array in arrays))
        if sum(sizes) != ends[-1]:
            raise UserError(f"{where} has {ends[-1]} values, but these ranks have {sum(sizes)}")
        begin = sum(sizes[: self.rank])
        end, overlaps = begin + sizes[self.rank], []
        for array, stop in zip(arrays, ends, strict=True):
            start = stop - array.shape[0]
            if start < end and begin < stop:
                overlaps.append(array.rows(max(begin - start, 0), min(end, stop) - start))
        return np.concatenate(overlaps) if overlaps else np.empty(0, arrays[0].dtype)


def _weighted(values: Sequence[HostArray], weights: HostArray) -> HostArray:
    """Return the weighted mean, in float64, summed in the order of the ranks."""
    total = np.zeros(np.shape(values[0]))
    for value, weight in zip(values, weights, strict=True):
        if weight:
            total += np.multiply(value, weight, dtype=np.float64)
    total /= weights.sum()
    return total


def _pieces(array: HostArray, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ranges of the first axis with about `PIECE` values each; a single range for an array
    without axes.

    Args:
        first, last: begin and end of all ranges; by default of the axis.
    """
    rows = array.shape[0] if array.ndim else 1
    last = rows if last is None else last
    count = max(1, PIECE * rows // max(1, array.size))
    for begin in range(first, last, count):
        yield begin, min(begin + count, last)


def _rows(array: HostArray, begin: int, end: int) -> HostArray:
    return array[begin:end] if array.ndim else array


def _read(array: StoredArray, begin: int, end: int) -> HostArray:
    return array.rows(begin, end) if array.shape else array.whole()


def leaves(
    value: Any, where: str, rule: str | None = None
) -> Iterator[tuple[str, str | None, Any]]:
    """Yield every leaf of a state: its name, its reshard rule, and its value. A nested state is no
    leaf.

    Local.
    """
    if is_state(value):
        for f in state_fields(value):
            name = f"{where}.{f.name}"
            yield from leaves(getattr(value, f.name), name, f.metadata.get("across"))
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from leaves(entry, f"{where}.{name}", rule)
    else:
        yield where, rule, value
