"""What all ranks must have in common where a learner waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np

from ..communication import CHECKSUM, FINGERPRINT_FACTOR, FINGERPRINT_PRIME, Communicator
from ..kernels import array_module
from ..optimizers import LocalStep
from .minibatch_ledger import MinibatchLedger
from .runner import AlgorithmRunner

Array = Any  #: a NumPy or CuPy array

EVERY = 64
"""Steps from one comparison of the ranks' models to the next, if nobody says otherwise: a pass over
memory each, where a step without any calculation of gradients takes three at least."""

IN_A_ROW = 4
"""Times that the ranks' gradients were the same to the bit, which by chance they never are."""

ALWAYS, NOW_AND_THEN = 32, 16
"""Steps in which the ranks' gradients are compared, and then every so many."""

FEW = 16  #: values of a gradient

SAME_GRADIENTS = (
    f"all ranks have had the same gradient, to the bit, {IN_A_ROW} times in a row: they seem to "
    "train on the same samples. Deal samples out to the ranks: by parallel_sgd.torch.sampler as "
    "the batch_sampler of a DataLoader, or by a parallel_sgd.data.Source. A DataLoader without a "
    "sampler of ranks gives every rank all samples, with shuffle=True, too"
)

STEP, FAIL, LOAD, MEET, FINISH = range(5)
CALLS = ("step", "fail", "load_checkpoint", "meet (evaluate, save)", "finish")


class ConsistencyCheck:
    """While a learner's call on all ranks lasts, the ranks see where they agree that they do the
    same.

    That is: they call the same, of the same learner, and have got and trained on the same
    minibatches so far. The common model is compared now and then, and whenever they `meet`, and so
    are the algorithm's `replicas`, such as momenta. Ranks that load a checkpoint need nothing in
    common but that.

    What they should not have in common is their gradients: with one model that says that they train
    on the same samples. A mark of a few values is compared in the same sum, in the first steps and
    now and then.

    Args:
        number: of the learner on its communicator.
        at_work, local_step, announced: the learner's.
        own_mark: gives the mark of this rank's gradient, before it is exchanged; 0: it has none.
        every: steps from one comparison of models to the next; 0: they are never compared.

    Attributes:
        compares: whether models are compared, too.
        marks: whether gradients are.
        note, notes, mark, marks_equal: see `communication.ConsistencyCheck`.

    Local. Cost: about a microsecond, and a pass over the model where it is compared.
    """

    def __init__(
        self,
        number: int,
        runner: AlgorithmRunner,
        local_step: LocalStep,
        announced: MinibatchLedger,
        own_mark: Callable[[], int],
        every: int = EVERY,
    ) -> None:
        self._number, self._runner, self._every = number, runner, every
        self._local_step, self._announced = local_step, announced
        self.compares, self.marks = every > 0, True
        self.note = self.notes = self.mark = 0
        self.marks_equal = False
        self._own_mark, self._looks, self._same = own_mark, 0, 0
        self._call, self._steps = STEP, 0  #: the latter since models were compared
        self._checksums: dict[str, int] = {}

    def same_gradients(self) -> bool:
        """Whether all ranks have had the same gradient for `IN_A_ROW` times that they looked; asked
        after each step, and True once. Local."""
        if self.mark == 0:  # they have not looked
            return False
        self._same = self._same + 1 if self.marks_equal else 0
        return self._same == IN_A_ROW

    def begin(self, call: int, comm: Communicator) -> None:
        """From here until `comm.consistency` is None again."""
        self._call, self.notes, self.mark = call, self.note, 0
        comm.consistency = self

    @contextmanager
    def during(self, call: int, comm: Communicator) -> Iterator[None]:
        self.begin(call, comm)
        try:
            yield
        finally:
            comm.consistency = None

    def fingerprint(self, steps: int) -> int:
        sign = self._number * len(CALLS) + self._call
        if self._call == LOAD:  # ranks may have failed after other numbers of steps
            self._steps, self._checksums = 0, {}
            return sign
        self._steps += steps
        self.mark = self._mark() if self.marks and self._call == STEP else 0
        due = self._steps >= self._every or self._call >= MEET
        self._checksums = self._compare() if due and self.compares else {}
        for fact in (self._announced.given, self._announced.clock, *self._checksums.values()):
            sign = sign * FINGERPRINT_FACTOR + fact
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

    def _mark(self) -> int:
        """Of this rank's gradient; 0 where nobody looks, or all ranks have the whole minibatch."""
        self._looks += 1
        if self._looks > ALWAYS and self._looks % NOW_AND_THEN:
            return 0
        warm = self._local_step.samples < self._runner.algorithm.distributed_after
        return 0 if warm else self._own_mark()

    def _compare(self) -> dict[str, int]:
        """Checksums of what all ranks have in common now, by name; none where there is nothing."""
        runner, self._steps = self._runner, 0
        algorithm = runner.algorithm
        if algorithm.asynchronous or self._local_step.samples < algorithm.distributed_after:
            return {}  # before the end of the warm start machines may round differently
        replicas = algorithm.replicas(runner.state, runner.work)
        return {f"the model's {CHECKSUM}": checksum(runner.common_model())} | {
            f"the {name} vector's {CHECKSUM}": checksum(vector) for name, vector in replicas.items()
        }


def mark_of(gradient: Array) -> int:
    """A number from the bits of some values of a gradient [n], the last ones and others at equal
    distances; 0 where these are zeros, or one is not finite, as many ranks' may be alike. Local."""
    few = np.concatenate(
        [
            part if isinstance(part, np.ndarray) else part.get()
            for part in (gradient[-FEW:], gradient[:: max(1, len(gradient) // FEW)][:FEW])
        ]
    )
    if not few.any() or not np.isfinite(few).all():
        return 0
    return 1 + crc32(few.tobytes()) % (FINGERPRINT_PRIME - 1)


def checksum(x: Array) -> int:
    """The sum of a vector's bytes, as 64-bit words, modulo 2^64. Local. Cost: reads it once."""
    xp = array_module(x)
    words = x.view(xp.uint32)
    even = len(words) - len(words) % 2
    total = int(words[:even].view(xp.uint64).sum(dtype=xp.uint64))
    return (total + sum(map(int, words[even:]))) % 2**64
