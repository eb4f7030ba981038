"""A learner's state at an earlier time, in memory, and its restoration on the present ranks.

A snapshot of other ranks is restored by the reshard rules of `parallel_sgd.state`: a rank keeps its
part of a sum, stripes are cut anew, and values that no rank holds any more are zero. A rank without
a snapshot gets the state of the others, and zeros in place of a failed rank's part of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ...state import Cause
from ..state.reshard import leaves
from ..state.state_tree import HostArray, HostCopies, Tree, capture, flatten, restore, unflatten
from ..state.stateful import Stateful

ZERO_WHERE_MISSING = ("sum", "share")


@dataclass
class Snapshot:
    """All of a learner that a checkpoint holds, in memory.

    Attributes:
        generation: of the ranks; -1: nothing was taken.
        samples: of all ranks, at that time.
        tree, arrays: the state, as `state_tree.flatten` gives them.
        rank: this rank's number then.
        sizes: of all ranks' stripes then; empty where ranks cannot change.
        number: of commits before it; -1: none. (For `Rollback`, as the next two.)
        final: the model is the final one.
        companion: kept with the state.

    Memory: the state. The room of its arrays is used again by the next `take`.
    """

    generation: int = -1
    samples: int = 0
    tree: Tree = field(default_factory=dict)
    arrays: dict[str, HostArray] = field(default_factory=dict)
    rank: int = 0
    sizes: list[dict[str, int]] = field(default_factory=list)
    number: int = -1
    final: bool = False
    companion: Any = None
    room: HostCopies = field(default_factory=HostCopies)

    @property
    def taken(self) -> bool:
        """There is a state to restore. Local."""
        return self.generation >= 0

    def discard(self) -> None:
        """Hold nothing to restore any more. Local."""
        self.generation = -1

    def can_restore(self, learner: Stateful) -> bool:
        """Return whether the present ranks can restore it. Local.

        With servers only the ranks that took it can: each server's part is lost with the server.
        """
        same = self.generation == learner.world.generation
        return self.taken and (same or learner.runner.algorithm.roles.together)

    def take(self, learner: Stateful) -> None:
        """Keep the learner's state, between two steps; training is not affected.

        Collective where servers hold a part of the state; else local. Cost: one pass over memory.
        """
        self.generation = -1  # until it is whole
        self.tree, live = flatten(capture(learner))
        self.arrays = self.room.of(live)
        self.samples, self.rank = learner.samples, learner.comm.rank
        self.sizes = [dict(own) for own in learner.stripe_sizes]
        self.generation = learner.world.generation

    def restore(self, learner: Stateful) -> None:
        """Make the learner what it was, its place in the data included.

        Collective where ranks can change or servers hold a part of the state; else local.
        """
        same = self.generation == learner.world.generation
        if same or not learner.stripe_sizes:  # servers redistribute their parts themselves
            assert self.taken, "nothing was taken"
            restore(learner, unflatten(self.tree, self.arrays))
        else:
            SharedSnapshot(learner, self if self.taken else None).restore(learner)
        learner.state_replaced(Cause.RESTORED)


class SharedSnapshot:
    """A snapshot that some ranks hold, for all present ranks.

    Args:
        learner: on the present ranks; its state is that of a beginning.
        own: the snapshot, on a rank that holds it; at least one rank does.

    Attributes:
        samples, final, companion: of the snapshot.
        values_lost: of stripes and sums.

    Creation is collective.
    """

    def __init__(self, learner: Stateful, own: Snapshot | None) -> None:
        comm = self._comm = learner.comm
        self._own = own
        learner.wait()  # dictionaries of a rank without a snapshot may lack what they will have
        self._rules = {
            where: rule
            for name, state in learner.states.items()
            for where, rule, _ in leaves(state, name)
        }
        self._places = comm.allgather_object(own.rank if own else None)
        self._root = next(k for k, place in enumerate(self._places) if place is not None)
        self._all_hold = None not in self._places
        facts = None
        if own is not None and comm.rank == self._root:
            kinds = {name: (a.shape, a.dtype.str) for name, a in own.arrays.items()}
            facts = own.tree, kinds, own.sizes, own.samples, own.final, own.companion
        root = comm.allgather_object(facts)[self._root]
        self._tree, self._kinds, self._sizes, self.samples, self.final, self.companion = root
        if own is not None:
            self._tree, self.companion = own.tree, own.companion
        self.values_lost = self._lost()

    def _lost(self) -> int:
        """Count the values of sums and stripes that failed ranks held."""
        failed = set(range(len(self._sizes))) - set(self._places)
        stripes = sum(sum(self._sizes[place].values()) for place in failed)
        sums = sum(
            int(np.prod(shape))
            for name, (shape, _) in self._kinds.items()
            if self._rules.get(name) == "sum"
        )
        return stripes + sums * len(failed)

    def restore(self, learner: Stateful) -> None:
        """Make the learner what it was, on the present ranks. Collective."""
        restore(learner, self._whole_tree(learner.stripe_sizes))
        learner.runner.algorithm.reconfigured(learner.runner.state, learner.runner.work)

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
        """Return this rank's part of a vector; zeros where no rank has it any more."""
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
        """Return another rank's tree without its own part of what ranks hold together."""
        if isinstance(value, dict):
            return {
                name: self._without_shares(entry, f"{where}.{name}")
                for name, entry in value.items()
            }
        rule = self._rules.get(where[1:])
        return 0 if rule == "share" else None if rule == "drop" else value
