"""A checkpoint of K ranks, for another number of them, by the rules of `parallel_sgd.state`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..array_files import StoredArray
from ..errors import UserError
from .learner import Learner
from .state_tree import HostArray, Tree, is_state, state_fields

Read = Callable[[int, str], StoredArray]  #: of an old rank, by its name in the checkpoint

PIECE = 1 << 18  #: values that are accumulated at a time


def stripe_sizes(learner: Learner) -> dict[str, int]:
    """How many values this rank's stripes have, by field. Local."""
    return {
        where: len(value)
        for where, meaning, value in leaves(learner.state, "algorithm")
        if meaning == "stripe" and value is not None
    }


def reshard(
    learner: Learner,
    saved: Sequence[Tree],
    weights: Sequence[int],
    sizes: Sequence[Mapping[str, int]],
    read: Read,
) -> Tree:
    """The tree of a new rank, from those of all old ones.

    Args:
        learner: new; its fields say what each value means, and nothing of it is changed.
        saved: flattened trees of the old ranks.
        weights: what the model of each old rank counts in a mean.
        sizes: `stripe_sizes` of all new ranks.
        read: finds an array.
    Returns:
        A tree for `state_tree.restore`.
    Raises:
        UserError: a field does not say what it means on another number of ranks.

    Local. Cost: reads the model of every old rank; accumulates in float64, by pieces. Memory: the
    new tree, and some pieces.
    """
    return _Resharding(learner, weights, sizes, read).tree(saved)


class _Resharding:
    def __init__(
        self,
        learner: Learner,
        weights: Sequence[int],
        sizes: Sequence[Mapping[str, int]],
        read: Read,
    ) -> None:
        self.learner, self.sizes, self.read = learner, sizes, read
        self.rank, self.size = learner.comm.rank, learner.comm.size
        self.weights = list(weights) if any(weights) else [1] * len(weights)

    def tree(self, saved: Sequence[Tree]) -> Tree:
        optimizer = self.learner.local_step.state
        return {
            "parameters": self._mean([each["parameters"] for each in saved]),
            "optimizer": self._walk(optimizer, [t["optimizer"] for t in saved], "optimizer"),
            "algorithm": self._walk(
                self.learner.state, [t["algorithm"] for t in saved], "algorithm"
            ),
        }

    def _walk(self, live: Any, parts: list[Any], where: str, meaning: str | None = None) -> Any:
        if is_state(live) and isinstance(parts[0], dict):
            return {
                f.name: self._walk(
                    getattr(live, f.name),
                    [part[f.name] for part in parts],
                    f"{where}.{f.name}",
                    f.metadata.get("across"),
                )
                for f in state_fields(live)
            }
        if isinstance(parts[0], dict):
            live = live if isinstance(live, dict) else {}
            return {
                name: self._walk(
                    live.get(name), [part[name] for part in parts], f"{where}.{name}", meaning
                )
                for name in parts[0]
            }
        if all(part is None for part in parts):
            return None
        rule = getattr(self, f"_{meaning}", None) if meaning else None
        lacking = any(part is None for part in parts) and meaning not in ("same", "sum")
        if rule is None or lacking:
            raise UserError(
                f"{where} does not say what it means on another number of ranks "
                "(parallel_sgd.state.across)"
            )
        return rule(parts, where) if meaning == "stripe" else rule(parts)

    def _same(self, parts: list[Any]) -> Any:
        first = parts[0]
        return self.read(0, first[0]).whole() if isinstance(first, list) else first

    def _most(self, parts: list[Any]) -> Any:
        return max(parts)

    def _share(self, parts: list[Any]) -> int:
        total = sum(parts)
        return int(total // self.size + (self.rank < total % self.size))

    def _mean(self, parts: list[Any]) -> Any:
        weights = np.array(self.weights, np.float64)
        if not isinstance(parts[0], list):
            values = [np.array(part, np.float64) for part in parts]
            alike = all(np.array_equal(value, values[0], equal_nan=True) for value in values)
            return parts[0] if alike else float(_weighted(values, weights))
        arrays = [self.read(rank, part[0]) for rank, part in enumerate(parts)]
        out, equal = np.empty(arrays[0].shape, arrays[0].dtype), True
        for begin, end in _pieces(out):
            values = [_read(array, begin, end) for array in arrays]
            equal = equal and all(
                np.array_equal(value, values[0], equal_nan=True) for value in values
            )
            _rows(out, begin, end)[...] = _weighted(values, weights)
        if equal:
            for begin, end in _pieces(out):
                _rows(out, begin, end)[...] = _read(arrays[0], begin, end)
        return out

    def _sum(self, parts: list[Any]) -> Any:
        """That of old ranks rank, rank + size, ...; zeros where there are none, or they have
        nothing."""
        mine = [rank for rank in range(self.rank, len(parts), self.size) if parts[rank] is not None]
        some = next(rank for rank, part in enumerate(parts) if part is not None)
        if not isinstance(parts[some], list):
            return float(sum((parts[rank] for rank in mine), np.float64(0)))
        first = self.read(some, parts[some][0])
        arrays = [self.read(rank, parts[rank][0]) for rank in mine]
        out = np.empty(first.shape, first.dtype)
        for begin, end in _pieces(out):
            total = np.zeros(np.shape(_rows(out, begin, end)))
            for array in arrays:
                total += _read(array, begin, end)
            _rows(out, begin, end)[...] = total
        return out

    def _stripe(self, parts: list[Any], where: str) -> HostArray:
        arrays = [self.read(rank, part[0]) for rank, part in enumerate(parts)]
        sizes = [sizes.get(where, 0) for sizes in self.sizes]
        ends = list(accumulate(array.shape[0] for array in arrays))
        if sum(sizes) != ends[-1]:
            raise UserError(f"{where} has {ends[-1]} values, but these ranks have {sum(sizes)}")
        begin = sum(sizes[: self.rank])
        end, found = begin + sizes[self.rank], []
        for array, stop in zip(arrays, ends, strict=True):
            start = stop - array.shape[0]
            if start < end and begin < stop:
                found.append(array.rows(max(begin - start, 0), min(end, stop) - start))
        return np.concatenate(found) if found else np.empty(0, arrays[0].dtype)


def _weighted(values: Sequence[HostArray], weights: HostArray) -> HostArray:
    """The weighted mean, in float64, summed in the order of the ranks."""
    total = np.zeros(np.shape(values[0]))
    for value, weight in zip(values, weights, strict=True):
        if weight:
            total += np.multiply(value, weight, dtype=np.float64)
    total /= weights.sum()
    return total


def _pieces(array: HostArray) -> Iterator[tuple[int, int]]:
    """Rows of the first axis, about `PIECE` values at a time; one piece of what has no axes."""
    rows = array.shape[0] if array.ndim else 1
    each = max(1, PIECE * rows // max(1, array.size))
    for begin in range(0, rows, each):
        yield begin, min(begin + each, rows)


def _rows(array: HostArray, begin: int, end: int) -> HostArray:
    return array[begin:end] if array.ndim else array


def _read(array: StoredArray, begin: int, end: int) -> HostArray:
    return array.rows(begin, end) if array.shape else array.whole()


def leaves(
    value: Any, where: str, meaning: str | None = None
) -> Iterator[tuple[str, str | None, Any]]:
    """Every value of a state that is no state itself: its name, its meaning across ranks, it.

    Local.
    """
    if is_state(value):
        for f in state_fields(value):
            name = f"{where}.{f.name}"
            yield from leaves(getattr(value, f.name), name, f.metadata.get("across"))
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from leaves(each, f"{where}.{name}", meaning)
    else:
        yield where, meaning, value
