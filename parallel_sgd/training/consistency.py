"""Consistency checks: facts that must be equal on all ranks, compared whenever a learner waits for
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np

from ..communication import CHECKSUM, FINGERPRINT_FACTOR, FINGERPRINT_PRIME, Communicator
from ..kernels import array_module
from ..local_step import LocalStep
from .minibatch_ledger import MinibatchLedger
from .runner import AlgorithmRunner

Array = Any  #: a NumPy or CuPy array

EVERY = 64
"""Default number of steps between two comparisons of the ranks' models. A comparison costs one pass
over memory; a step takes at least three, even without computing gradients."""

IN_A_ROW = 4
"""Consecutive looks with bit-identical gradients on all ranks before the warning: this never
happens by chance."""

ALWAYS, NOW_AND_THEN = 32, 16
"""Number of first steps with a comparison of gradients, and the interval of later comparisons."""

FEW = 16  #: values of a gradient

SAME_GRADIENTS = (
    f"all ranks have had the same gradient, to the bit, {IN_A_ROW} times in a row: the ranks seem "
    "to train on the same samples. Give each rank its own samples: by parallel_sgd.torch.sampler "
    "as the batch_sampler of a DataLoader, or by a parallel_sgd.data.Source. A DataLoader without "
    "a sampler of ranks gives every rank all samples, also with shuffle=True"
)

STEP, FAIL, LOAD, MEET, FINISH = range(5)
CALLS = ("step", "fail", "load_checkpoint", "meet (evaluate, save)", "finish")


class ConsistencyCheck:
    """Compares facts between the ranks during a learner's collective call, at no extra message.

    The compared facts: the call itself, the learner, and the minibatches issued and trained on so
    far. Every few steps and at each `meet` also the common model, and the algorithm's `replicas`,
    such as momenta. While loading a checkpoint, only the call is compared.

    Gradients, in contrast, must differ: equal gradients of one model mean that the ranks train on
    the same samples. A mark made of a few gradient values is compared in the same sum, in the first
    steps and at intervals later.

    Args:
        number: of the learner on its communicator.
        runner, local_step, ledger: the learner's.
        gradient_mark: returns the mark of this rank's gradient before the exchange; 0 means no
            mark.
        every: steps between two comparisons of models; 0: models are never compared.
        before: the check of the learner before its ranks have changed, if any.

    Attributes:
        compares: True if models are compared, too.
        marks: True if gradients are compared.
        note, notes, mark, marks_equal: see `communication.ConsistencyCheck`.

    Local. Cost: about a microsecond, plus a pass over the model at each comparison of models.
    """

    def __init__(
        self,
        number: int,
        runner: AlgorithmRunner,
        local_step: LocalStep,
        ledger: MinibatchLedger,
        gradient_mark: Callable[[], int],
        every: int = EVERY,
        before: ConsistencyCheck | None = None,
    ) -> None:
        self._number, self._runner, self._every = number, runner, every
        self._local_step, self._ledger = local_step, ledger
        self.compares: bool = every > 0 if before is None else before.compares
        self.marks = True
        self.note = self.notes = self.mark = 0
        self.marks_equal = False
        self._gradient_mark, self._looks, self._same = gradient_mark, 0, 0
        self._call, self._steps = STEP, 0  #: _steps: since the latest comparison of models
        self._checksums: dict[str, int] = {}

    def same_gradients(self) -> bool:
        """Return True once: when all ranks have had the same gradient for `IN_A_ROW` consecutive
        looks. Call this after each step. Local."""
        if self.mark == 0:  # no look in this step
            return False
        self._same = self._same + 1 if self.marks_equal else 0
        return self._same == IN_A_ROW

    def begin(self, call: int, comm: Communicator) -> None:
        """Start the check, on `comm`, for one call; the check lasts until `comm.consistency` is
        None again."""
        self._call, self.notes, self.mark = call, self.note, 0
        comm.consistency = self

    @contextmanager
    def during(self, call: int, comm: Communicator) -> Iterator[None]:
        self.begin(call, comm)
        try:
            yield
        finally:
            comm.consistency = None

    def meet(self, comm: Communicator) -> None:
        """Synchronize all ranks, and check them. Collective.

        Raises:
            SharedError: on all ranks, if any rank has failed or the ranks differ.
        """
        with self.during(MEET, comm):
            self._runner.meet()

    def fingerprint(self, steps: int) -> int:
        sign = self._number * len(CALLS) + self._call
        if self._call == LOAD:  # ranks may have failed after different numbers of steps
            self._steps, self._checksums = 0, {}
            return sign
        self._steps += steps
        self.mark = self._mark() if self.marks and self._call == STEP else 0
        due = self._steps >= self._every or self._call >= MEET
        self._checksums = self._compare() if due and self.compares else {}
        for fact in (self._ledger.issued, self._ledger.clock, *self._checksums.values()):
            sign = sign * FINGERPRINT_FACTOR + fact
        return sign

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "call of the ranks": f"{CALLS[self._call]} of learner {self._number}"
        }
        if self._call != LOAD:
            issued, clock = self._ledger.issued, self._ledger.clock
            facts["samples issued so far (one step for each minibatch)"] = issued
            facts["samples trained on so far"] = clock
        return facts | {name: f"{value:016x}" for name, value in self._checksums.items()}

    def _mark(self) -> int:
        """Return the mark of this rank's gradient; 0 in steps without a look, and in the warm
        start, when all ranks have the whole minibatch."""
        self._looks += 1
        if self._looks > ALWAYS and self._looks % NOW_AND_THEN:
            return 0
        warm = self._local_step.samples < self._runner.algorithm.distributed_after
        return 0 if warm else self._gradient_mark()

    def _compare(self) -> dict[str, int]:
        """Return checksums of the model and its replicas, by name; empty while ranks train
        asynchronously or in the warm start."""
        runner, self._steps = self._runner, 0
        algorithm = runner.algorithm
        if algorithm.asynchronous or self._local_step.samples < algorithm.distributed_after:
            return {}  # before the end of the warm start machines may round differently
        replicas = algorithm.replicas(runner.state, runner.work)
        vectors = {f"{name} vector": vector for name, vector in replicas.items()}
        if algorithm.has_common_model:
            vectors = {"model": runner.common_model(), **vectors}
        return {f"the {name}'s {CHECKSUM}": checksum(vector) for name, vector in vectors.items()}


def mark_of(gradient: Array) -> int:
    """Return a number made from the bits of some values of a gradient [n]: the last values, and
    more at equal distances. Return 0 if these are all zero, or if one is not finite, because many
    ranks may then have equal values. Local."""
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
    """Return the sum of a vector's bytes, as 64-bit words, modulo 2^64. Local. Cost: reads the
    vector once."""
    xp = array_module(x)
    words = x.view(xp.uint32)
    even = len(words) - len(words) % 2
    total = int(words[:even].view(xp.uint64).sum(dtype=xp.uint64))
    return (total + sum(map(int, words[even:]))) % 2**64
