"""Copies of a learner's state in memory, and how the ranks share one where they are others now.

A copy is put back by the reshard rules of `parallel_sgd.state`: what a rank has of a sum stays with
it, stripes are cut anew, and what nobody has any more is zero. A rank without a copy gets the state
of the others, and zeros in place of what a dead one had of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ..state.reshard import leaves
from ..state.state_tree import HostArray, HostCopies, Tree, capture, flatten, restore, unflatten
from ..state.stateful import Stateful

ZERO_WHERE_MISSING = ("sum", "share")


@dataclass
class Copy:
    """A learner's state as it was.

    Attributes:
        number: of copies before it; -1 where there is none.
        generation: of the ranks; -1 where there is none.
        samples: of all ranks, at that time.
        finished: whether the model was the final one.
        tree, arrays: of the state, as `state_tree.flatten` gives them.
        place: this rank's among the ranks, and what stripes each of them had.
        companion: what goes back with it.
    """

    number: int = -1
    generation: int = -1
    samples: int = 0
    finished: bool = False
    tree: Tree = field(default_factory=dict)
    arrays: dict[str, HostArray] = field(default_factory=dict)
    place: int = 0
    sizes: list[dict[str, int]] = field(default_factory=list)
    companion: Any = None
    room: HostCopies = field(default_factory=HostCopies)

    def take(self, learner: Stateful, sizes: Sequence[Mapping[str, int]]) -> None:
        """Keep what the learner is now, between two steps; training is not affected. Collective
        where servers hold a part of it; else local. Cost: one pass over memory.

        Args:
            sizes: of all ranks' stripes, where copies may be shared.
        """
        self.generation = -1  # until it is whole
        self.tree, live = flatten(capture(learner))
        self.arrays = self.room.of(live)
        self.samples, self.place = learner.samples, learner.comm.rank
        self.sizes, self.generation = [dict(own) for own in sizes], learner.world.generation

    def put_back(self, learner: Stateful) -> None:
        """Make the learner what it was, its place in the data included. Collective likewise."""
        restore(learner, unflatten(self.tree, self.arrays))


class Sharing:
    """A copy that some ranks hold, for all of them.

    Args:
        learner: whose ranks they are now; its state is that of a beginning.
        own: the copy, on a rank that holds it; one does at least.

    Attributes:
        samples, finished, companion: of the copy.
        values_lost: of stripes and sums.

    Creation is collective.
    """

    def __init__(self, learner: Stateful, own: Copy | None) -> None:
        comm = self._comm = learner.comm
        self._own = own
        learner.wait()  # dictionaries of a rank without a copy may lack what they will have
        self._rules = {
            where: rule
            for name, state in learner.states.items()
            for where, rule, _ in leaves(state, name)
        }
        self._places = comm.allgather_object(own.place if own else None)
        self._root = next(k for k, place in enumerate(self._places) if place is not None)
        self._all_hold = None not in self._places
        told = None
        if own is not None and comm.rank == self._root:
            kinds = {name: (a.shape, a.dtype.str) for name, a in own.arrays.items()}
            told = own.tree, kinds, own.sizes, own.samples, own.finished, own.companion
        root = comm.allgather_object(told)[self._root]
        self._tree, self._kinds, self._sizes, self.samples, self.finished, self.companion = root
        if own is not None:
            self._tree, self.companion = own.tree, own.companion
        self.values_lost = self._lost()

    def _lost(self) -> int:
        """Values of sums and stripes that those had who have died."""
        dead = set(range(len(self._sizes))) - set(self._places)
        stripes = sum(sum(self._sizes[place].values()) for place in dead)
        sums = sum(
            int(np.prod(shape))
            for name, (shape, _) in self._kinds.items()
            if self._rules.get(name) == "sum"
        )
        return stripes + sums * len(dead)

    def put_back(self, learner: Stateful, sizes: Sequence[Mapping[str, int]]) -> None:
        """Make the learner what it was. Collective.

        Args:
            sizes: of all ranks' stripes now.
        """
        restore(learner, self._whole_tree(sizes))

    def _whole_tree(self, sizes: Sequence[Mapping[str, int]]) -> Tree:
        arrays: dict[str, Any] = dict(self._own.arrays) if self._own else {}
        arrays |= {name: self._array(name, sizes) for name in self._kinds}
        tree: Tree = unflatten(self._tree, arrays)
        return tree if self._own else self._without_shares(tree, "")

    def _array(self, name: str, sizes: Sequence[Mapping[str, int]]) -> HostArray | None:
        shape, dtype = self._kinds[name]
        if self._rules.get(name) == "stripe":
            return self._stripe(name, np.dtype(dtype), sizes)
        own = self._own.arrays.get(name) if self._own else None  # an optimizer may have begun later
        if self._rules.get(name) in ZERO_WHERE_MISSING:
            return np.zeros(shape, dtype) if own is None else own
        if self._rules.get(name) == "drop":
            return own
        if not self._all_hold:
            told = np.empty(shape, dtype)
            if own is not None and self._comm.rank == self._root:
                told[...] = own
            self._comm.broadcast(told.reshape(-1), self._root)
            own = told if own is None else own
        return own

    def _stripe(self, name: str, dtype: Any, sizes: Sequence[Mapping[str, int]]) -> HostArray:
        """This rank's part of a vector; zeros where nobody has it any more."""
        before = [sizes_then.get(name, 0) for sizes_then in self._sizes]
        begins = [0, *accumulate(before)]
        counts = [0 if place is None else before[place] for place in self._places]
        own = self._own.arrays[name] if self._own else np.empty(0, dtype)
        received = np.empty(sum(counts), dtype)
        self._comm.allgather(own, received, counts)
        whole, at = np.zeros(begins[-1], dtype), 0
        for place, count in zip(self._places, counts, strict=True):
            if count:
                whole[begins[place] : begins[place] + count] = received[at : at + count]
                at += count
        now = [theirs.get(name, 0) for theirs in sizes]
        begin = sum(now[: self._comm.rank])
        return whole[begin : begin + now[self._comm.rank]]

    def _without_shares(self, value: Any, where: str) -> Any:
        """A tree of another rank's numbers, without what that has of what ranks have together."""
        if isinstance(value, dict):
            return {
                name: self._without_shares(entry, f"{where}.{name}")
                for name, entry in value.items()
            }
        rule = self._rules.get(where[1:])
        return 0 if rule == "share" else None if rule == "drop" else value
