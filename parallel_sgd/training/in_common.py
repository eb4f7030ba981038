"""What all ranks must have in common where a learner waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..algorithms import Algorithm
from ..communication import SIGN_FACTOR, Communicator
from ..kernels import array_module
from ..optimizers import LocalStep
from .announced import Announced

Array = Any  #: a NumPy or CuPy array

EVERY = 64
"""Steps from one comparison of the ranks' models to the next: a pass over memory each, where a
step without any calculation of gradients takes three at least."""

STEP, FAIL, LOAD, MEET, FINISH = range(5)
CALLS = ("step", "fail", "load_checkpoint", "meet (evaluate, save)", "finish")


class InCommon:
    """While a learner's call on all ranks lasts, the ranks see where they agree that they do the
    same.

    That is: they call the same, of the same learner, and have got and trained on the same
    minibatches so far. The common model is compared now and then, and whenever they `meet`. Ranks
    that load a checkpoint need nothing in common but that.

    Args:
        number: of the learner on its communicator.
        algorithm, local_step, announced: the learner's.
        model: gives the model that all ranks have in common.

    Attributes:
        compares: whether models are compared, too.
        note, notes: see `communication.InCommon`.

    Local. Cost: about a microsecond, and a pass over the model where it is compared.
    """

    def __init__(
        self,
        number: int,
        algorithm: Algorithm[Any],
        local_step: LocalStep,
        announced: Announced,
        model: Callable[[], Array],
    ) -> None:
        self._number, self._algorithm, self._model = number, algorithm, model
        self._local_step, self._announced = local_step, announced
        self.compares = True
        self.note = self.notes = 0
        self._call, self._steps = STEP, 0  #: the latter since models were compared
        self._checksum: int | None = None

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
            self._steps, self._checksum = 0, None
            return sign
        self._steps += steps
        due = self._steps >= EVERY or self._call >= MEET
        self._checksum = self._compare() if due and self.compares else None
        for fact in (self._announced.given, self._announced.clock, self._checksum):
            if fact is not None:
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
        if self._checksum is not None:
            facts["the model's checksum"] = f"{self._checksum:016x}"
        return facts

    def _compare(self) -> int | None:
        """The checksum of the model that all ranks have in common now; None where there is none."""
        algorithm, self._steps = self._algorithm, 0
        if algorithm.asynchronous or self._local_step.samples < algorithm.distributed_after:
            return None  # before the end of the warm start machines may round differently
        return checksum(self._model())


def checksum(x: Array) -> int:
    """The sum of a vector's bytes, as 64-bit words, modulo 2^64. Local. Cost: reads it once."""
    xp = array_module(x)
    words = x.view(xp.uint32)
    even = len(words) - len(words) % 2
    total = int(words[:even].view(xp.uint64).sum(dtype=xp.uint64))
    return (total + sum(map(int, words[even:]))) % 2**64
