"""A checkpoint of K ranks, for another number of them, by the rules of `parallel_sgd.state`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UserError
from .captured import HostArray, Tree, is_state, state_fields
from .learner import Learner

Read = Callable[[int, str], HostArray]  #: an array of an old rank, by its name in the checkpoint


def stripe_sizes(learner: Learner) -> dict[str, int]:
    """How many values this rank's stripes have, by field. Local."""
    return {
        where: len(value)
        for where, meaning, value in leaves(learner.state, "algorithm")
        if meaning == "stripe" and value is not None
    }


def regroup(
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
        read: reads an array.
    Returns:
        A tree for `captured.restore`.
    Raises:
        UserError: a field does not say what it means on another number of ranks.

    Local. Cost: reads the model of every old rank; accumulates in float64.
    """
    return _Regrouping(learner, weights, sizes, read).tree(saved)


class _Regrouping:
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

    def _value(self, rank: int, part: Any) -> Any:
        return self.read(rank, part[0]) if isinstance(part, list) else part

    def _same(self, parts: list[Any]) -> Any:
        return self._value(0, parts[0])

    def _most(self, parts: list[Any]) -> Any:
        return max(parts)

    def _share(self, parts: list[Any]) -> int:
        total = sum(parts)
        return int(total // self.size + (self.rank < total % self.size))

    def _mean(self, parts: list[Any]) -> Any:
        first = self._value(0, parts[0])
        total, equal = np.zeros(np.shape(first)), True
        for rank, (part, weight) in enumerate(zip(parts, self.weights, strict=True)):
            value = first if rank == 0 else self._value(rank, part)
            equal = equal and np.array_equal(value, first, equal_nan=True)
            if weight:
                total += np.multiply(value, weight, dtype=np.float64)
        if equal:
            return first
        total /= sum(self.weights)
        return total.astype(first.dtype) if isinstance(first, np.ndarray) else float(total)

    def _sum(self, parts: list[Any]) -> Any:
        """That of old ranks rank, rank + size, ...; zeros where there are none, or they have
        nothing."""
        mine = range(self.rank, len(parts), self.size)
        some = next(rank for rank, part in enumerate(parts) if part is not None)
        first = self._value(some, parts[some])
        total = np.zeros(np.shape(first))
        for rank in mine:
            if parts[rank] is not None:
                total += self._value(rank, parts[rank])
        return total.astype(first.dtype) if isinstance(first, np.ndarray) else float(total)

    def _stripe(self, parts: list[Any], where: str) -> HostArray:
        sizes = [sizes.get(where, 0) for sizes in self.sizes]
        whole = np.concatenate([self._value(rank, part) for rank, part in enumerate(parts)])
        if sum(sizes) != len(whole):
            raise UserError(f"{where} has {len(whole)} values, but these ranks have {sum(sizes)}")
        begin = sum(sizes[: self.rank])
        return whole[begin : begin + sizes[self.rank]]


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
