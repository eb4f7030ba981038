"""Snapshots of a learner's state in memory, also restored on changed ranks.

A snapshot is restored by the reshard rules of `parallel_sgd.state`: each rank keeps its own part of
a sum, stripes are cut anew, and values lost with failed ranks become zero. A rank without a
snapshot receives the state of the remaining ranks, with zeros for a failed rank's parts of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ...state import Cause, wait_for
from ..state.reshard import leaves
from ..state.state_tree import HostArray, HostCopies, Tree, capture, flatten, restore, unflatten
from ..state.stateful import Stateful

ZERO_WHERE_MISSING = ("sum", "share")


@dataclass
class Snapshot:
    """A learner's state in memory, with the same contents as a checkpoint.

    Attributes:
        generation: of the ranks; -1 if empty.
        samples: of all ranks, at the time of the snapshot.
        tree, arrays: the state, as returned by `state_tree.flatten`.
        rank: this rank's number at that time.
        sizes: of all ranks' stripes at that time; empty if ranks cannot change.
        number: count of earlier commits; -1 without. (Used by `Rollback`, as are the next four.)
        place: number of the first snapshot of this place in training: each recovery takes another.
        final: True if the model was final.
        session_state: stored along with the state.
        lost: count of the values of sums and stripes that were lost before.

    Memory: the state. The next `take` reuses the memory of the arrays.
    """

    generation: int = -1
    samples: int = 0
    tree: Tree = field(default_factory=dict)
    arrays: dict[str, HostArray] = field(default_factory=dict)
    rank: int = 0
    sizes: list[dict[str, int]] = field(default_factory=list)
    number: int = -1
    place: int = -1
    final: bool = False
    session_state: Any = None
    lost: int = 0
    room: HostCopies = field(default_factory=HostCopies)

    @property
    def taken(self) -> bool:
        """True if there is a state to restore. Local."""
        return self.generation >= 0

    def discard(self) -> None:
        """Empty the snapshot. Local."""
        self.generation = -1

    def can_restore(self, learner: Stateful) -> bool:
        """Return True if the present ranks can restore the snapshot. Local.

        With servers, all ranks of the snapshot must still be present: each server's part is lost
        with the server.
        """
        same = self.generation == learner.world.generation
        return self.taken and (same or learner.runner.algorithm.roles.together)

    def take(self, learner: Stateful) -> None:
        """Store the learner's present state, between two steps; training is not affected.

        Collective if servers hold a part of the state; otherwise local. Cost: one pass over memory.
        """
        self.generation = -1  # until the snapshot is complete
        self.tree, live = flatten(capture(learner))
        self.arrays = self.room.of(live)
        self.samples, self.rank = learner.samples, learner.comm.rank
        self.sizes = [dict(own) for own in learner.stripe_sizes]
        self.generation = learner.world.generation

    def restore(self, learner: Stateful) -> None:
        """Restore the learner's state, including its position in the data.

        Collective if ranks can change or servers hold a part of the state; otherwise local.
        """
        same = self.generation == learner.world.generation
        if same or not learner.stripe_sizes:  # servers redistribute their own parts
            assert self.taken, "no snapshot was taken"
            restore(learner, unflatten(self.tree, self.arrays))
        else:
            SharedSnapshot(learner, self if self.taken else None).restore(learner)
        learner.state_replaced(Cause.RESTORED)


class SharedSnapshot:
    """A snapshot held by some ranks, for restoring on all present ranks.

    Args:
        learner: on the present ranks, in its initial state.
        own: this rank's snapshot, or None. At least one rank has a snapshot.

    Attributes:
        samples, final, session_state: of the snapshot.
        values_lost: of stripes and sums, so far.

    Creation is collective.
    """

    def __init__(self, learner: Stateful, own: Snapshot | None) -> None:
        comm = self._comm = learner.comm
        self._own = own
        # Dictionaries of a rank without a snapshot may lack entries until then.
        wait_for(learner.states)
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
            state = own.samples, own.final, own.session_state, own.lost
            facts = own.tree, kinds, own.sizes, *state
        root = comm.allgather_object(facts)[self._root]
        self._tree, self._kinds, self._sizes, *state = root
        self.samples, self.final, self.session_state, lost_before = state
        if own is not None:
            self._tree, self.session_state = own.tree, own.session_state
        self.values_lost = lost_before + self._lost()

    def _lost(self) -> int:
        """Count the values in the failed ranks' stripes and parts of sums."""
        if self.samples == 0:  # before the first step all of them are zero
            return 0
        failed = set(range(len(self._sizes))) - set(self._places)
        stripes = sum(sum(self._sizes[place].values()) for place in failed)
        sums = sum(
            int(np.prod(shape))
            for name, (shape, _) in self._kinds.items()
            if self._rules.get(name) == "sum"
        )
        return stripes + sums * len(failed)

    def restore(self, learner: Stateful) -> None:
        """Restore the learner's state on the present ranks. Collective."""
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
        own = self._own.arrays.get(name) if self._own else None  # None: added later
        if self._rules.get(name) in ZERO_WHERE_MISSING:
            return np.zeros(shape, dtype) if own is None else own
        if self._rules.get(name) == "drop":
            return own
        if not self._all_hold:
            values = np.empty(shape, dtype)
            if own is not None and self._comm.rank == self._root:
                values[...] = own
            self._comm.broadcast(values.reshape(-1), self._root)
            own = values if own is None else own
        return own

    def _stripe(self, name: str, dtype: Any, sizes: Sequence[Mapping[str, int]]) -> HostArray:
        """Return this rank's part of a vector; lost values are zero."""
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
        """Return another rank's tree, with 0 for numbers whose sum is kept, and None for "drop"
        values."""
        if isinstance(value, dict):
            return {
                name: self._without_shares(entry, f"{where}.{name}")
                for name, entry in value.items()
            }
        rule = self._rules.get(where[1:])
        if rule in ZERO_WHERE_MISSING and isinstance(value, int):
            return 0
        return None if rule == "drop" else value
