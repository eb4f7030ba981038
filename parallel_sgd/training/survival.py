"""How a learner goes on where ranks have died: from a copy of its state, on those that are left.

Every rank keeps copies in memory, taken at the same steps. When some have died, the others agree on
the newest copy that all of them hold, and go back to it. What the algorithm makes of the number of
ranks is made anew, and the state is redistributed by the reshard rules of `parallel_sgd.state`:
what a rank has of a sum stays with it, stripes are cut anew. What the dead ones held of sums and
stripes is lost. The clock goes back with the state, so sources deal out anew what came after it.

A rank that joins brings nothing but its program: it gets the state of the others, and zeros in
place of what the dead one had of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ..communication import is_loss
from ..errors import RanksLost
from .reshard import leaves, stripe_sizes
from .state_tree import HostArray, HostCopies, Tree, capture, flatten, restore, unflatten
from .stateful import Stateful

COMMIT_EVERY = 10  #: steps

MOST_IN_VAIN = 3
"""Times that the ranks regroup, and nobody was missing, in a row: then something else is wrong."""

ZERO_WHERE_JOINED = ("sum", "share")


@dataclass
class Copy:
    """A learner's state as it was.

    Attributes:
        number: of copies before it; -1 where there is none.
        samples: of all ranks, at that time.
        finished: whether the model was the final one.
        tree, arrays: of the state, as `state_tree.flatten` gives them.
        place: this rank's among the ranks, and what stripes each of them had.
        companion: what goes back with it.
    """

    number: int = -1
    samples: int = 0
    finished: bool = False
    tree: Tree = field(default_factory=dict)
    arrays: dict[str, HostArray] = field(default_factory=dict)
    place: int = 0
    sizes: list[dict[str, int]] = field(default_factory=list)
    companion: Any = None
    room: HostCopies = field(default_factory=HostCopies)


@dataclass
class Losses:
    """What has been lost so far, for `Learner.report`.

    Attributes:
        samples: of all ranks, that were trained on again.
        values: of residuals that were held by those that have died.
    """

    samples: int = 0
    values: int = 0


class Survival:
    """Keeps a learner's copies, and takes it back to one.

    Args:
        learner: whose ranks survive each other.
        commit_every: steps from one copy to the next, where the algorithm allows it.

    Attributes:
        companion: keeps something beside each copy: what it returns, `restore_companion` is given
            when training goes back to it.
        losses: so far.

    Memory: two copies of the state. Cost: a pass over it for each copy.
    """

    def __init__(self, learner: Stateful, commit_every: int) -> None:
        self._learner, self._every = learner, commit_every
        self._copies = (Copy(), Copy())
        self._taken = self._steps = 0  # copies so far; steps since the latest
        self._generation, self._in_vain = learner.world.generation, 0
        self._sizes: list[dict[str, int]] = []  # of all ranks' stripes
        self.companion: Callable[[], Any] = lambda: None
        self.restore_companion: Callable[[Any], object] = lambda kept: None
        self.losses = Losses()

    def begin(self) -> None:
        """Take the first copy, or where others have gone on already, get what they have.
        Collective."""
        if self._generation:
            self._take_part()
        else:
            self._sizes = self._learner.comm.allgather_object(stripe_sizes(self._learner))
            self.commit()

    def survives(self, step: Callable[[], object]) -> bool:
        """Take a step, and a copy after it where one is due; False where ranks have died, and the
        others have gone back. Collective."""
        world = self._learner.world
        try:
            if world.generation != self._generation or world.spares:
                raise RanksLost("the ranks have changed, or can")
            step()
            self._steps += 1
            work = self._learner.at_work
            if self._steps >= self._every and work.algorithm.replicated(work.state, work.work):
                self.commit()
                self._in_vain = 0
        except Exception as error:
            if not is_loss(error) or self._in_vain > MOST_IN_VAIN:
                raise
            self.recover()
            return False
        return True

    def complete_pass(self) -> None:
        """All has been trained on that a source has given: see that none goes back behind it any
        more. Collective."""
        self.commit()
        try:
            self._learner.meet()  # whoever comes through it knows that all have the copy
        except Exception as error:
            if not is_loss(error):
                raise
            self.recover(grows=False)

    def finish(self, complete: Callable[[], object]) -> None:
        """Complete the model, again if need be, until all ranks that are left have the same.
        Collective."""
        while True:
            try:
                complete()
                self.commit(finished=True)
                self._learner.meet()
                return
            except Exception as error:
                if not is_loss(error):
                    raise
                self.recover(grows=False)
                if max(self._copies, key=lambda copy: copy.number).finished:
                    return

    def commit(self, *, finished: bool = False) -> None:
        """Take a copy, which training can go back to. All ranks do so after the same step. Local.

        Args:
            finished: the model is the final one.
        """
        learner, copy = self._learner, self._copies[self._taken % 2]
        copy.number = -1  # until it is whole
        copy.tree, live = flatten(capture(learner))
        copy.arrays = copy.room.of(live)
        copy.samples, copy.finished = learner.samples, finished
        copy.place, copy.sizes = learner.comm.rank, self._sizes
        copy.companion = self.companion()
        copy.number, self._taken, self._steps = self._taken, self._taken + 1, 0

    def recover(self, *, grows: bool = True) -> None:
        """Go on from the newest copy that all ranks have, on those that are left.

        Args:
            grows: whether ranks in reserve may join.

        Collective among them. Where more die meanwhile, it begins anew.
        """
        world = self._learner.world
        while True:
            try:
                regroups = world.generation == self._generation
                if regroups:
                    world.revoke()
                self._learner.at_work.abandon()
                if regroups:
                    before = world.world_ranks
                    world.regroup(grows=grows)
                    self._in_vain += world.world_ranks == before
                self._generation = world.generation
                self._learner.form_again()
                self._take_part()
                return
            except Exception as error:
                if not is_loss(error) or self._in_vain > MOST_IN_VAIN:
                    raise

    def report(self) -> dict[str, Any]:
        """What has been lost so far, as JSON can hold it. Local."""
        world = self._learner.world
        return {
            "ranks": list(world.world_ranks),
            "ranks_lost": list(world.lost_ranks),
            "samples_trained_again": self.losses.samples,
            "residual_values_lost": self.losses.values,
        }

    def _take_part(self) -> None:
        """Agree on a copy, and make the state of this rank of it. Collective."""
        learner, comm = self._learner, self._learner.comm
        held = {copy.number: copy for copy in self._copies if copy.number >= 0}
        everybody = comm.allgather_object((sorted(held), learner.samples, self.losses))
        newest = [max(numbers) for numbers, _, _ in everybody if numbers]
        if not newest:  # nobody has come further than this
            self._sizes = comm.allgather_object(stripe_sizes(learner))
            self.commit()
            return
        number = min(newest)
        holders = [rank for rank, (numbers, _, _) in enumerate(everybody) if number in numbers]
        own = held.get(number)
        self._sizes = comm.allgather_object(stripe_sizes(learner))
        shared = Sharing(learner, holders, own)
        restore(learner, shared.tree(self._sizes))
        work = learner.at_work
        work.algorithm.regrouped(work.state, work.work)
        learner.restarted()
        for copy in self._copies:
            copy.number = copy.number if copy is own else -1
        clock = max(samples for numbers, samples, _ in everybody if numbers)
        self.losses = everybody[holders[0]][2]  # a rank that joins knows nothing of them
        self.losses.samples += clock - shared.samples
        self.losses.values += shared.values_lost
        self.restore_companion(shared.companion)
        self._taken = number + 1
        self.commit(finished=shared.finished)
        self._tell(clock - shared.samples)

    def _tell(self, again: int) -> None:
        world = self._learner.world
        if world.rank == 0:
            lost = ", ".join(map(str, world.lost_ranks)) or "none"
            print(
                f"parallel_sgd: ranks that have died: {lost}; {world.size} go on from "
                f"{self._learner.samples} samples, and train on {again} again",
                file=sys.stderr,
                flush=True,
            )


def begin_with_those_left(comm: Any, begin: Callable[[], object]) -> None:
    """Begin something; again, where ranks have died in it, with those that are left. Collective."""
    while True:
        try:
            begin()
            return
        except Exception as error:
            if not (is_loss(error) and comm.survives):
                raise
            comm.revoke()
            comm.regroup(grows=True)


class Sharing:
    """A copy that some ranks hold, for all of them.

    Args:
        learner: whose ranks they are now; its state is that of a beginning.
        holders: their ranks.
        own: the copy, on a rank that holds it.

    Attributes:
        samples, finished, companion: of the copy.
        values_lost: of stripes and sums.

    Creation is collective.
    """

    def __init__(self, learner: Stateful, holders: list[int], own: Copy | None) -> None:
        comm = self._comm = learner.comm
        self._learner, self._holders, self._own = learner, holders, own
        self._root, self._all_hold = holders[0], len(holders) == comm.size
        self._rules = {
            where: rule
            for name, state in learner.states.items()
            for where, rule, _ in leaves(state, name)
        }
        self._places = comm.allgather_object(own.place if own else None)
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

    def tree(self, sizes: list[dict[str, int]]) -> Tree:
        """This rank's state. Collective.

        Args:
            sizes: of all ranks' stripes now.
        """
        arrays = {name: self._array(name, sizes) for name in self._kinds}
        tree: Tree = unflatten(self._tree, arrays)
        return tree if self._own else self._without_shares(tree, "")

    def _array(self, name: str, sizes: list[dict[str, int]]) -> HostArray:
        shape, dtype = self._kinds[name]
        if self._rules.get(name) == "stripe":
            return self._stripe(name, np.dtype(dtype), sizes)
        own = self._own.arrays[name] if self._own else None
        if self._rules.get(name) in ZERO_WHERE_JOINED:
            return np.zeros(shape, dtype) if own is None else own
        if not self._all_hold:
            told = np.empty(shape, dtype)
            if own is not None and self._comm.rank == self._root:
                told[...] = own
            self._comm.broadcast(told.reshape(-1), self._root)
            own = told if own is None else own
        assert own is not None
        return own

    def _stripe(self, name: str, dtype: Any, sizes: list[dict[str, int]]) -> HostArray:
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
        return 0 if self._rules.get(where[1:]) == "share" else value
