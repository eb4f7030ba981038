"""What a program's own loop does wrongly with PyTorch's gradients, as far as it can be noticed."""

from __future__ import annotations

from typing import Any

from ..algorithms import Algorithm
from ..communication import Communicator
from ..warning import warn
from .module import FlatModule

ALWAYS, NOW_AND_THEN = 32, 16
"""Steps before each of which gradients are looked at, and then before every so many."""

IN_A_ROW = 2  #: steps that were given too few samples

CHANGED = (
    "the gradient of {name!r} was changed between backward and step. There it is the gradient of "
    "this rank's samples alone. A change that depends on its size, such as "
    "torch.nn.utils.clip_grad_norm_, differs between the ranks, and from what one process does. To "
    "clip, give the learner clip_norm=...: it clips the gradient of all ranks. A factor that is "
    "the same on all ranks, a mask, and noise do no harm"
)
CHANGED_TOO_LATE = (
    "the gradient of {name!r} was changed between backward and step. With overlap=True that has no "
    "effect on what has been sent by then. To clip, give the learner clip_norm=...: it clips the "
    "gradient of all ranks; for other changes use overlap=False"
)
TOO_FEW = (
    "step(samples={samples}) after {times} backwards on {times} minibatches of the sampler: "
    "{samples} samples are those of one minibatch. The others count as left out, and epochs become "
    "shorter. Give step the samples of all minibatches whose gradients were added up"
)


class LoopChecks:
    """Looks at what a loop does between two steps, and warns once of each thing.

    Args:
        module: whose gradients.
        algorithm: the learner's. Where ranks do not exchange the gradients of each step, a
            program may clip its own.
        comm: the ranks that train. The first one warns.

    Where a filter makes an error of a warning, `before_step` and `after_step` raise a UserError.
    Local. Cost: where nothing is wrong, after the first steps, none.
    """

    def __init__(self, module: FlatModule, algorithm: Algorithm[Any], comm: Communicator) -> None:
        self._module, self._overlap, self._warns = module, algorithm.overlap, comm.rank == 0
        exchanged = comm.size > 1 and algorithm.synchronizes_every_step
        self._looks_for_changes = self._warns and exchanged
        self._looks_next = True
        module.probe.keeps = self._looks_for_changes and not self._overlap
        self._steps = self._short = 0
        self._given = self._added_up = 0  # minibatches for the step under way; as many as backwards

    def before_step(self, samples: int, given: int, *, distributed: bool) -> None:
        """Before a step of so many samples has gathered the gradients.

        Args:
            given: minibatches that a source has given since the step before, in this thread.
            distributed: whether each rank has its part of the minibatch.
        """
        added_up = self._warns and given > 1 and max(self._module.backwards) == given
        self._given, self._added_up = given, given if added_up else 0
        if not (self._looks_for_changes and samples and distributed):
            return
        self._steps += 1
        looks, self._looks_next = self._looks_next, self._is_due(self._steps + 1)
        self._module.probe.keeps = self._looks_next and not self._overlap
        if not looks:
            return
        name = self._module.changed(own_hooks=1 + self._overlap, sent=self._overlap)
        if name is not None:
            self._looks_for_changes = self._module.probe.keeps = False
            warn((CHANGED_TOO_LATE if self._overlap else CHANGED).format(name=name))

    def _is_due(self, step: int) -> bool:
        return step <= ALWAYS or step % NOW_AND_THEN == 0

    def after_step(self, samples: int, taken: int) -> None:
        """After it has taken so many minibatches of the source."""
        if self._given <= 0:  # all were fetched ahead, or the pass has begun: nobody can tell
            return
        times = self._added_up
        short = times > taken > 0
        self._short = self._short + 1 if short else 0
        if self._short == IN_A_ROW:
            warn(TOO_FEW.format(samples=samples, times=times))
