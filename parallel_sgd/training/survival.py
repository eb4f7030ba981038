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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ..communication import Communicator, is_loss
from ..errors import RanksLost
from .copies import Copy, Sharing
from .reshard import stripe_sizes
from .state_tree import put_back, unflatten
from .stateful import Stateful

Result = TypeVar("Result")

COMMIT_EVERY = 10  #: steps

MOST_IN_VAIN = 3
"""Times that the ranks regroup, and nobody was missing, in a row: then something else is wrong."""


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
        losses: so far.
        times: that training has gone back.
        sizes: of all ranks' stripes.
        has_joined: whether this rank had no copy when training went back last.
        by_itself: whether each step of the learner is told by itself to `stepped`.

    Memory: two copies of the state. Cost: a pass over it for each copy.
    """

    def __init__(self, learner: Stateful, commit_every: int) -> None:
        self._learner, self._every = learner, commit_every
        self._copies = (Copy(), Copy())
        self._taken = self._steps = 0  # copies so far; steps since the latest
        self._paused = False
        self._generation, self._in_vain = learner.world.generation, 0
        self.sizes: list[dict[str, int]] = []  # of all ranks' stripes
        self._companion: Callable[[], Any] = lambda: None
        self.by_itself = True
        self.has_joined = False
        self._kept: Any = None  #: beside the copy that training has gone back to
        self.losses = Losses()
        self.times = 0

    def begin(self) -> None:
        """Take the first copy, or where others have gone on already, get what they have.
        Collective."""
        if self._generation:
            self._take_part()
        else:
            self.sizes = self._learner.comm.allgather_object(stripe_sizes(self._learner))
            self.commit()

    def keep(self, companion: Callable[[], Any]) -> Any:
        """Keep something beside each copy, from now on; a step takes none by itself any more, but
        whoever keeps it, when it has done what follows from a step (`stepped`). Local.

        Args:
            companion: gives it, as JSON can hold it.
        Returns:
            What was kept beside the copy that training has gone back to; None where it has not.
        """
        self._companion, self.by_itself = companion, False
        return self._kept

    def keep_nothing(self) -> None:
        """Nothing is kept beside copies any more. Local."""
        self._companion, self._kept, self.by_itself = (lambda: None), None, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For a `with` block no copies are taken: of what is only tried. Local."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def surviving(self, function: Callable[[], Result]) -> Result:
        """What a function returns, which is called again wherever ranks have died in it. Collective
        where that is."""
        while True:
            try:
                return function()
            except Exception as error:
                if not is_loss(error) or self._in_vain > MOST_IN_VAIN:
                    raise
                self.recover()

    def survives(self, call: Callable[[], object]) -> bool:
        """Do what all ranks do together; False where ranks have died, or can join, and training has
        gone back. Collective."""
        world = self._learner.world
        try:
            if world.generation != self._generation or world.spares:
                raise RanksLost("the ranks have changed, or can")
            call()
        except Exception as error:
            if not is_loss(error) or self._in_vain > MOST_IN_VAIN:
                raise
            self.recover()
            return False
        return True

    def stepped(self) -> None:
        """A step has been taken: take a copy where one is due. Local, but that what runs in the
        background is waited for."""
        self._steps += 1
        work = self._learner.at_work
        if self._steps >= self._every and work.algorithm.replicated(work.state, work.work):
            self.commit()
            self._in_vain = 0

    def complete_pass(self) -> None:
        """All has been trained on that a source has given: see that none goes back behind it any
        more. Collective."""
        try:
            self.commit()
            self._learner.meet()  # whoever comes through it knows that all have the copy
        except Exception as error:
            if not is_loss(error):
                raise
            self.recover(grows=False)

    def between_steps(self, function: Callable[[], Result]) -> Result:
        """See `Learner.between_steps`. Collective."""
        while True:
            number = None
            try:
                result = function()
                self.commit()
                number = self._taken - 1
                self._learner.meet()  # whoever comes through it knows that all have the copy
                return result
            except Exception as error:
                if not is_loss(error) or self._in_vain > MOST_IN_VAIN:
                    raise
                self.recover(grows=False)  # a rank that joins would not come here
                if number is not None and self._taken > number + 1:  # back to that very copy
                    return result

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
        if not self._paused:
            self._take_copy(finished, self._companion())

    def _take_copy(self, finished: bool, companion: Any) -> None:
        copy = self._copies[self._taken % 2]
        copy.number = -1  # until it is whole
        copy.take(self._learner, self.sizes)
        copy.finished, copy.companion = finished, companion
        copy.number, self._taken, self._steps = self._taken, self._taken + 1, 0

    def set_back(self, name: str) -> None:
        """Make one of the learner's states again what it is in the latest copy. Local."""
        copy = max(self._copies, key=lambda copy: copy.number)
        put_back(self._learner, name, unflatten(copy.tree[name], copy.arrays))

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
                self._learner.abandon()
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
        losses = self.losses.samples, self.losses.values
        everybody = comm.allgather_object((sorted(held), learner.samples, losses))
        newest = [max(numbers) for numbers, _, _ in everybody if numbers]
        if not newest:  # nobody has come further than this
            self.sizes = comm.allgather_object(stripe_sizes(learner))
            self.commit()
            return
        number = min(newest)
        own = held.get(number)
        self.sizes = comm.allgather_object(stripe_sizes(learner))
        shared = Sharing(learner, own)
        shared.put_back(learner, self.sizes)
        work = learner.at_work
        work.algorithm.regrouped(work.state, work.work)
        learner.restarted()
        self.times += 1
        for copy in self._copies:
            copy.number = copy.number if copy is own else -1
        clock = max(samples for numbers, samples, _ in everybody if numbers)
        self.losses = Losses(*max(known for _, _, known in everybody))  # a new rank knows of none
        self.losses.samples += clock - shared.samples
        self.losses.values += shared.values_lost
        self._kept, self.has_joined = shared.companion, own is None
        self._taken = number + 1
        self._take_copy(shared.finished, self._kept)
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
    if isinstance(comm, Communicator):
        comm.end_prologue()
    while True:
        try:
            begin()
            return
        except Exception as error:
            if not (is_loss(error) and comm.survives):
                raise
            comm.revoke()
            comm.regroup(grows=True)
