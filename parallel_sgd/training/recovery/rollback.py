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

from ...communication.stderr import write_stderr
from ...errors import RanksLost
from ..state.reshard import stripe_sizes
from ..state.state_tree import put_back, unflatten
from ..state.stateful import Stateful
from .base import Recovery
from .snapshot import Copy, Sharing

Result = TypeVar("Result")

COMMIT_EVERY = 10  #: steps


@dataclass
class Losses:
    """What has been lost so far, for `Learner.report`.

    Attributes:
        samples: of all ranks, that were trained on again.
        values: of residuals that were held by those that have died.
    """

    samples: int = 0
    values: int = 0


class Rollback(Recovery):
    """Keeps a learner's copies, and takes it back to one.

    Args:
        learner: whose ranks survive each other.
        commit_every: steps from one copy to the next, where the algorithm allows it.

    Attributes:
        losses: so far.
        by_itself: whether each step of the learner is told by itself to `stepped`.

    Memory: two copies of the state. Cost: a pass over it for each copy.
    """

    def __init__(self, learner: Stateful, commit_every: int) -> None:
        super().__init__(learner)
        self._learner: Stateful
        self._every = commit_every
        self._copies = (Copy(), Copy())
        self._taken = self._steps = 0  # copies so far, as all count them; steps since the latest
        self._back_to = sys.maxsize  # in one recovery: the earliest copy that was gone back to
        self._paused = self._at_end = False  # _at_end: the model is the final one, as it was kept
        self._companion: Callable[[], Any] = lambda: None
        self._kept: Any = None  #: beside the copy that training has gone back to
        self.losses = Losses()

    def begin(self) -> None:
        """Take the first copy, or where others have gone on already, get what they have.
        Collective."""
        if self._generation:
            self._rejoin()
        else:
            self.sizes = self._learner.comm.allgather_object(stripe_sizes(self._learner))
            self.commit()

    def keep(self, companion: Callable[[], Any]) -> Any:
        super().keep(companion)
        self._companion = companion
        return self._kept

    def keep_nothing(self) -> None:
        super().keep_nothing()
        self._companion, self._kept = (lambda: None), None

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def went_back(self) -> None:
        if self._paused:
            return
        self._at_end = False
        if self._steps == 0:
            self._learner.world.barrier()  # see `_all_have_a_copy`
        self.commit()

    def surviving(self, function: Callable[[], Result]) -> Result:
        """What a function returns, which is called again wherever ranks have died in it. Collective
        where that is."""
        while True:
            try:
                return function()
            except Exception as error:
                self._require_loss(error)
                self.recover()

    def fault_tolerant(self, call: Callable[[], object]) -> bool:
        """Do what all ranks do together; False where ranks have died, or can join, and training has
        gone back. Collective."""
        world = self._learner.world
        try:
            if world.generation != self._generation or world.spares:
                raise RanksLost("the ranks have changed, or can")
            call()
        except Exception as error:
            self._require_loss(error)
            self.recover()
            return False
        return True

    def all_come_through(self, function: Callable[[], Result]) -> Result:
        """What a function returns; where a rank has died whoever calls it has to know, since
        training goes back."""
        return function()

    def recovers_step(self, step: Callable[[], object]) -> bool:
        """As `fault_tolerant`."""
        return self.fault_tolerant(step)

    def stepped(self) -> None:
        """Take a copy where one is due. What runs in the background is waited for."""
        self._steps, self._at_end = self._steps + 1, False
        work = self._learner.runner
        if self._steps >= self._every and work.algorithm.replicated(work.state, work.work):
            self.commit()
            self._fruitless = 0

    def complete_pass(self) -> bool:
        return self._all_have_a_copy(lambda: None) is not None

    def between_steps(self, function: Callable[[], Result]) -> Result:
        """See `Learner.between_steps`. Collective."""
        while True:
            results = self._all_have_a_copy(function)
            if results is not None:
                return results[0]

    def finish(self, complete: Callable[[], object]) -> None:
        """Complete the model, again if need be, until all ranks that are left have the same.
        Collective."""

        def completed() -> None:
            if not self._at_end:
                complete()

        while self._all_have_a_copy(completed, finished=True) is None:
            pass

    def _all_have_a_copy(
        self, function: Callable[[], Result], *, finished: bool = False
    ) -> tuple[Result] | None:
        """What a function gives on this rank, when all that are left have a copy of what is then;
        None where training has gone back to before. (A session is told of deaths itself.)

        A death may come as some ranks have heard that all have the copy, and others have not. The
        others see it by the copy that they have gone back to. Between two copies all meet: else
        some may hold none that others still have.
        """
        number = None
        try:
            result = function()
            algorithm = self._learner.runner.algorithm
            met = self._steps > 0 and algorithm.synchronizes_every_step  # since the copy before
            if not (met or self._paused):
                self._learner.meet()
            self.commit(finished=finished)
            number = None if self._paused else self._taken - 1
            self._learner.meet()  # whoever comes through it knows that all have the copy
            return (result,)
        except Exception as error:
            self._require_loss(error)
            if not self.by_itself:  # the session begins anew, on all ranks
                raise
            self.recover(allow_join=False)  # a rank that joins would not come here
            is_there = number is not None and self._back_to >= number
            return (result,) if is_there else None

    def commit(self, *, finished: bool = False) -> None:
        """Take a copy, which training can go back to. All ranks do so after the same step. Local.

        Args:
            finished: the model is the final one.
        """
        if not self._paused:
            self._take_copy(finished, self._companion())

    def _take_copy(self, finished: bool, companion: Any) -> None:
        copy = min(self._copies, key=lambda copy: copy.number)
        copy.number = -1  # until it is whole
        copy.take(self._learner, self.sizes)
        copy.finished, copy.companion = finished, companion
        copy.number, self._taken, self._steps = self._taken, self._taken + 1, 0

    def set_back(self, name: str) -> None:
        copy = max(self._copies, key=lambda copy: copy.number)
        put_back(self._learner, name, unflatten(copy.tree[name], copy.arrays))

    def recover(self, *, allow_join: bool = True) -> None:
        """Go on from the newest copy that all ranks have, on those that are left."""
        self._back_to = sys.maxsize
        while True:
            try:
                self._reconfigure(allow_join=allow_join)
                self._rejoin()
                return
            except Exception as error:
                self._require_loss(error)

    def report(self) -> dict[str, Any]:
        """What has been lost so far, as JSON can hold it. Local."""
        world = self._learner.world
        return {
            "ranks": list(world.world_ranks),
            "ranks_lost": list(world.failed_ranks),
            "samples_trained_again": self.losses.samples,
            "residual_values_lost": self.losses.values,
        }

    def _rejoin(self) -> None:
        """Agree on a copy, and make the state of this rank of it. Collective."""
        learner, comm = self._learner, self._learner.comm
        held = {copy.number: copy for copy in self._copies if copy.number >= 0}
        losses = self.losses.samples, self.losses.values
        everybody = comm.allgather_object((sorted(held), learner.samples, losses))
        known = [numbers for numbers, _, _ in everybody if numbers]
        if not known:  # nobody has come further than this
            self.sizes = comm.allgather_object(stripe_sizes(learner))
            self.commit()
            return
        common = set(known[0]).intersection(*known)
        number = max(common) if common else min(max(numbers) for numbers in known)
        self._back_to = min(self._back_to, number)
        own = held.get(number)
        self.sizes = comm.allgather_object(stripe_sizes(learner))
        shared = Sharing(learner, own)
        shared.put_back(learner, self.sizes)
        work = learner.runner
        work.algorithm.reconfigured(work.state, work.work)
        learner.restarted()
        self.times += 1
        for copy in self._copies:
            copy.number = copy.number if copy is own else -1
        clock = max(shared.samples, *(samples for numbers, samples, _ in everybody if numbers))
        self.losses = Losses(*max(known for _, _, known in everybody))  # a new rank knows of none
        self.losses.samples += clock - shared.samples
        self.losses.values += shared.values_lost
        self._kept, self.has_joined = shared.companion, own is None
        self._at_end = shared.finished
        self._taken = 1 + max(max(numbers) for numbers in known)  # some may still hold that one
        self._take_copy(shared.finished, self._kept)
        self._tell(clock - shared.samples, shared.values_lost)

    def _tell(self, again: int, values: int) -> None:
        world = self._learner.world
        if world.rank == 0:
            lost = ", ".join(map(str, world.failed_ranks)) or "none"
            residuals = f"; {values} values of residuals are lost" if values else ""
            write_stderr(
                f"parallel_sgd: ranks that have died: {lost}; {world.size} go on from "
                f"{self._learner.samples} samples, and train on {again} again{residuals}"
            )
