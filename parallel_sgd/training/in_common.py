"""What all ranks must have in common where a learner waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..communication import CHECKSUM, SIGN_FACTOR, Communicator
from ..kernels import array_module
from ..optimizers import LocalStep
from .announced import Announced
from .at_work import AlgorithmAtWork

Array = Any  #: a NumPy or CuPy array

EVERY = 64
"""Steps from one comparison of the ranks' models to the next, if nobody says otherwise: a pass over
memory each, where a step without any calculation of gradients takes three at least."""

STEP, FAIL, LOAD, MEET, FINISH = range(5)
CALLS = ("step", "fail", "load_checkpoint", "meet (evaluate, save)", "finish")


class InCommon:
    """While a learner's call on all ranks lasts, the ranks see where they agree that they do the
    same.

    That is: they call the same, of the same learner, and have got and trained on the same
    minibatches so far. The common model is compared now and then, and whenever they `meet`, and so
    are the algorithm's `replicas`, such as momenta. Ranks that load a checkpoint need nothing in
    common but that.

    Args:
        number: of the learner on its communicator.
        at_work, local_step, announced: the learner's.
        every: steps from one comparison of models to the next; 0: they are never compared.

    Attributes:
        compares: whether models are compared, too.
        note, notes: see `communication.InCommon`.

    Local. Cost: about a microsecond, and a pass over the model where it is compared.
    """

    def __init__(
        self,
        number: int,
        at_work: AlgorithmAtWork,
        local_step: LocalStep,
        announced: Announced,
        every: int = EVERY,
    ) -> None:
        self._number, self._at_work, self._every = number, at_work, every
        self._local_step, self._announced = local_step, announced
        self.compares = every > 0
        self.note = self.notes = 0
        self._call, self._steps = STEP, 0  #: the latter since models were compared
        self._checksums: dict[str, int] = {}

    def begin(self, call: int, comm: Communicator) -> None:
        """From here until `comm.in_common` is None again."""
        self._call, self.notes = call, self.note
        comm.in_common = self

    @contextmanager
    def during(self, call: int, comm: Communicator) -> Iterator[None]:
        self.begin(call, comm)
        try:
            yield
        finally:
            comm.in_common = None

    def sign(self, steps: int) -> int:
        sign = self._number * len(CALLS) + self._call
        if self._call == LOAD:  # ranks may have failed after other numbers of steps
            self._steps, self._checksums = 0, {}
            return sign
        self._steps += steps
        due = self._steps >= self._every or self._call >= MEET
        self._checksums = self._compare() if due and self.compares else {}
        for fact in (self._announced.given, self._announced.clock, *self._checksums.values()):
            sign = sign * SIGN_FACTOR + fact
        return sign

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "what the ranks do": f"{CALLS[self._call]} of learner {self._number}"
        }
        if self._call != LOAD:
            given, clock = self._announced.given, self._announced.clock
            facts["samples of the minibatches so far (one step for each)"] = given
            facts["samples that were trained on so far"] = clock
        return facts | {name: f"{value:016x}" for name, value in self._checksums.items()}

    def _compare(self) -> dict[str, int]:
        """Checksums of what all ranks have in common now, by name; none where there is nothing."""
        at_work, self._steps = self._at_work, 0
        algorithm = at_work.algorithm
        if algorithm.asynchronous or self._local_step.samples < algorithm.distributed_after:
            return {}  # before the end of the warm start machines may round differently
        replicas = algorithm.replicas(at_work.state, at_work.work)
        return {f"the model's {CHECKSUM}": checksum(at_work.common_model())} | {
            f"the {name} vector's {CHECKSUM}": checksum(vector) for name, vector in replicas.items()
        }


def checksum(x: Array) -> int:
    """The sum of a vector's bytes, as 64-bit words, modulo 2^64. Local. Cost: reads it once."""
    xp = array_module(x)
    words = x.view(xp.uint32)
    even = len(words) - len(words) % 2
    total = int(words[:even].view(xp.uint64).sum(dtype=xp.uint64))
    return (total + sum(map(int, words[even:]))) % 2**64
