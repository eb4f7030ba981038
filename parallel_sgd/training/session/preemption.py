"""All ranks leave together where any of them is asked to: with a checkpoint, and a code of its own.

A notice does not reach all ranks, nor all at once. So the ranks ask each other, after the same
step on all: about every second (`EVERY_S`), or after each step where that takes longer.
Asynchronous workers, who have to wait for each other to do so, ask more seldom
(`EVERY_ASYNCHRONOUS_S`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...communication.job_environment import fault_tolerant
from ...communication.liveness.abort import print_labelled
from ...communication.liveness.preemption import (
    listen,
    preempt_on,
    preemption_requested,
    requeue,
    requeues,
)
from ...errors import Preempted
from ..learner import Learner

EVERY_S = 1.0
EVERY_ASYNCHRONOUS_S = 10.0


class Preemption:
    """
    Args:
        learner: whose ranks may be asked to leave.
        saves: whether all state can be saved; else the ranks stay.

    Attributes:
        agreed: whether all ranks leave.

    Where nobody has said by which signals (`communication.preemption`) nothing is asked, and
    `agreed` stays False. Local.
    """

    def __init__(self, learner: Learner, *, saves: bool) -> None:
        self._learner, self._wanted = learner, saves and bool(preempt_on())
        asynchronous = learner.algorithm.asynchronous
        self._every_s = EVERY_ASYNCHRONOUS_S if asynchronous else EVERY_S
        self.agreed = self._asked = False
        self.begin()
        listen()

    def begin(self) -> None:
        """Begin to count steps, on all ranks; anew, where some have died. Local."""
        self._steps, self._ask_at, self._since = 0, 1, time.perf_counter()
        self._asked |= self.agreed  # and could not, since one has died: they ask each other again
        self.agreed = False

    def stepped(self) -> bool:
        """Whether all ranks leave, after one more step. Collective where ranks ask.

        Raises:
            UserError: on all ranks, as `Learner.meet`.

        Cost: about every `EVERY_S` seconds a gathering of two numbers, and a pass over the model.
        """
        self._steps += self._wanted
        if self._steps < self._ask_at:
            return False
        own = time.perf_counter() - self._since, self._asked or preemption_requested()
        passed, asked = zip(*self._learner.gathered(own), strict=True)
        pace = self._steps * self._every_s / max(*passed, 1e-9)
        # No more than twice as many as now: the first steps may have been slow, or quick.
        self._ask_at = max(1, int(min(pace, 2 * self._ask_at)))
        self._steps, self._since = 0, time.perf_counter()
        self.agreed = any(asked)
        return self.agreed

    def leave_if_agreed(self, save: Callable[[], object]) -> None:
        """Where all ranks leave: save, on the disk, requeue the job where asked, and leave.

        Args:
            save: all state. Collective.
        Raises:
            Preempted: on all ranks.

        Collective; what is under way comes to its end, and servers are let go.
        """
        if not self.agreed:
            return
        save()
        self._learner.finish()
        self.notify_servers()
        if self._learner.comm.rank == 0:
            print_labelled(
                f"parallel-sgd: asked to leave: all is saved after {self._learner.samples} samples"
            )
            if requeues():
                requeue()
        # Else the others' end may end the job before.
        self._learner.recovery.collective(lambda: self._learner.comm.barrier())
        raise Preempted

    def notify_servers(self) -> None:
        """Let ranks that only serve know, who have served by now, whether all leave. Collective
        over all ranks, where some only serve.

        Raises:
            Preempted: on those that serve, if so.
        """
        learner, world = self._learner, self._learner.world
        if not self._wanted or fault_tolerant() or learner.group.own.size == world.size:
            return
        if any(world.allgather_object(self.agreed)) and learner.serves:
            raise Preempted
