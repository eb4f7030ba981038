"""Preemption: all ranks save and exit together, with a special exit code.

A notice does not reach all ranks, nor all ranks at once. So the ranks gather their notices after
the same step on all ranks: about every second (`EVERY_S`), or after each step if steps take longer.
Asynchronous workers must wait for each other to do so, and gather less often
(`EVERY_SELDOM_S`).
"""

from __future__ import annotations

from collections.abc import Callable

from ... import runtime
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
EVERY_SELDOM_S = 10.0


class Preemption:
    """Agrees among all ranks to save and exit.

    Without signals for preemption (`communication.liveness.preemption`) the ranks gather nothing,
    and `agreed` stays False. Local.

    Args:
        learner: the learner of the ranks.
        saves: whether all state can be saved. False: the ranks stay.

    Attributes:
        agreed: whether all ranks exit.
    """

    def __init__(self, learner: Learner, *, saves: bool) -> None:
        self._learner, self._wanted = learner, saves and bool(preempt_on())
        algorithm = learner.algorithm
        waits_seldom = algorithm.asynchronous or algorithm.has_quorum
        self._every_s = EVERY_SELDOM_S if waits_seldom else EVERY_S
        self.agreed = self._asked = False
        self.begin()
        listen()

    def begin(self) -> None:
        """Restart the count of steps, on all ranks, also after a failure. Local."""
        self._steps, self._ask_at, self._since = 0, 1, runtime.perf_counter()
        self._asked |= self.agreed  # a failure prevented the exit: gather again
        self.agreed = False

    def stepped(self) -> bool:
        """Count a step, and return whether all ranks exit. Collective when ranks gather notices.

        Raises:
            UserError: on all ranks, as `Learner.meet`.

        Cost: about every `EVERY_S` seconds a gather of two numbers, and a pass over the model.
        """
        self._steps += self._wanted
        if self._steps < self._ask_at:
            return False
        local = runtime.perf_counter() - self._since, self._asked or preemption_requested()
        passed, asked = zip(*self._learner.gathered(local), strict=True)
        pace = self._steps * self._every_s / max(*passed, 1e-9)
        # At most doubled: the first steps may have been slow or quick.
        self._ask_at = max(1, int(min(pace, 2 * self._ask_at)))
        self._steps, self._since = 0, runtime.perf_counter()
        self.agreed = any(asked)
        return self.agreed

    def leave_if_agreed(self, save: Callable[[], object]) -> None:
        """Save all state, requeue the job if requested, and exit, if all ranks have agreed.

        Args:
            save: saves all state to the disk. Collective.
        Raises:
            Preempted: on all ranks.

        Collective. Pending work is completed, and servers are released.
        """
        if not self.agreed:
            return
        save()
        self._learner.finish()
        self.notify_servers()
        if self._learner.comm.rank == 0:
            print_labelled(
                f"parallel-sgd: preempted: all state is saved after {self._learner.samples} samples"
            )
            if requeues():
                requeue()
        # Else the exit of other ranks may end the job first.
        self._learner.recovery.collective(lambda: self._learner.comm.barrier())
        raise Preempted

    def notify_servers(self) -> None:
        """Inform ranks that only serve, once they have finished serving, whether all ranks exit.

        Collective over all ranks, if some only serve.

        Raises:
            Preempted: on ranks that only serve, if all ranks exit.
        """
        learner, world = self._learner, self._learner.world
        if not self._wanted or world.fault_tolerant or learner.group.own.size == world.size:
            return
        if any(world.allgather_object(self.agreed)) and learner.serves:
            raise Preempted
