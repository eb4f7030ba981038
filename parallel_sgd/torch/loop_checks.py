"""Checks for common mistakes of a program's own training loop with PyTorch's gradients."""

from __future__ import annotations

from typing import Any

from ..algorithms import Algorithm
from ..communication import Communicator
from ..warning import warn
from .module import FlatModule

FIRST_STEPS, CHECK_EVERY = 32, 16
"""Gradients are checked before each of the first `FIRST_STEPS` steps, then every `CHECK_EVERY`
steps.
"""

MOST_SHORT_STEPS = 2  #: consecutive steps with too few samples, before a warning

CHANGED = (
    "the gradient of {name!r} was changed between backward and step. At that point it is the "
    "gradient of this rank's samples only. A change that depends on its norm, such as "
    "torch.nn.utils.clip_grad_norm_, differs between the ranks, and from training in one process. "
    "To clip, give the learner clip_norm=...: it clips the gradient of all ranks. A factor that is "
    "the same on all ranks, a mask, and noise do no harm"
)
CHANGED_TOO_LATE = (
    "the gradient of {name!r} was changed between backward and step. With overlap=True this does "
    "not change the parts already sent. To clip, give the learner clip_norm=...: it clips the "
    "gradient of all ranks; for other changes use overlap=False"
)
TOO_FEW = (
    "step(samples={samples}) after {times} backwards on {times} minibatches of the sampler: "
    "one minibatch has {samples} samples. The remaining minibatches count as skipped, and epochs "
    "become shorter. Give step the samples of all minibatches whose gradients were added up"
)


class LoopChecks:
    """Check what a training loop does between two steps, and warn once of each mistake.

    Args:
        module: the module of the gradients.
        algorithm: the learner's. If ranks do not exchange the gradients of each step, a program may
            clip its own gradients, and changes are not checked.
        comm: the ranks that train. The first rank warns.

    If a filter turns a warning into an error, `before_step` and `after_step` raise a UserError.
    Local. Cost: none after the first steps, unless a mistake is found.
    """

    def __init__(self, module: FlatModule, algorithm: Algorithm[Any], comm: Communicator) -> None:
        self._module, self._overlap, self._warns = module, algorithm.overlap, comm.rank == 0
        exchanged = comm.size > 1 and algorithm.synchronizes_every_step
        self._checks_changes = self._warns and exchanged
        self._checks_next = True
        module.probe.keeps = self._checks_changes and not self._overlap
        self._steps = self._short = 0
        self._given = 0  #: minibatches issued for this step
        self._added_up = 0  #: the same number if each had a backward; otherwise 0

    def before_step(self, samples: int, given: int, *, distributed: bool) -> None:
        """Check the gradients before a step gathers them.

        Args:
            samples: of this rank in the step.
            given: the number of minibatches that a source has issued since the previous step, in
                this thread.
            distributed: whether each rank has its own part of the minibatch.
        Raises:
            UserError: if a filter turns a warning into an error.
        """
        added_up = self._warns and given > 1 and max(self._module.backwards) == given
        self._given, self._added_up = given, given if added_up else 0
        if not (self._checks_changes and samples and distributed):
            return
        self._steps += 1
        due, self._checks_next = self._checks_next, self._is_due(self._steps + 1)
        self._module.probe.keeps = self._checks_next and not self._overlap
        if not due:
            return
        name = self._module.changed(own_hooks=1 + self._overlap, sent=self._overlap)
        if name is not None:
            self._checks_changes = self._module.probe.keeps = False
            warn((CHANGED_TOO_LATE if self._overlap else CHANGED).format(name=name))

    def _is_due(self, step: int) -> bool:
        return step <= FIRST_STEPS or step % CHECK_EVERY == 0

    def after_step(self, samples: int, taken: int) -> None:
        """Check the step's number of samples.

        Args:
            samples: of this rank in the step.
            taken: the number of issued minibatches that the step has trained on.
        Raises:
            UserError: if a filter turns a warning into an error.
        """
        if self._given <= 0:  # all fetched ahead, or a new pass: unknown
            return
        times = self._added_up
        short = times > taken > 0
        self._short = self._short + 1 if short else 0
        if self._short == MOST_SHORT_STEPS:
            warn(TOO_FEW.format(samples=samples, times=times))
