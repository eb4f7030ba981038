"""A minibatch's gradients on their way from backward to the update, around their exchange."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..communication import Communicator
from ..compression import problem_with
from ..errors import UserError
from .arrays import as_tensor
from .module import FlatModule
from .overlap import Overlap
from .scaling import Scaling

Array = Any  #: a NumPy or CuPy array

UNUSED, LATE = 1, 1 << 20
"""In a note to the other ranks: a parameter has no gradient here; a part of one comes late."""

SMALL = 1e-6  #: what `torch.nn.utils.clip_grad_norm_` adds to a norm


@dataclass
class GradientUse:
    """Of a minibatch whose gradient is under way: which parameters have one on this rank.

    Attributes:
        here: by parameter.
        agreed: whether the ranks ask each other, since some lack one; None until that is known.
    """

    here: Sequence[bool]
    agreed: bool | None = None


class Gradients:
    """
    Args:
        module: whose gradients.
        comm: the ranks that train.
        mean: whether a loss is the mean over its samples, or their sum.
        divides: whether the optimizer is given the mean gradient, and a pass divides by samples.
        clip_norm: the largest norm that an optimizer is given; None: any.
        scaling: of the loss; None: there is none.
        overlap: where gradients are exchanged while backward goes on.
        together: whether the ranks agree on every minibatch.
        notes: what the ranks have told each other as they agreed on the present one.
        sum_late: sums a vector over the ranks.

    Attributes:
        unit: how many samples a gradient of 1 stands for in the module's vector; of an optimizer
            that divides by the samples there is then nothing left to divide, as long as minibatches
            have as many as the first one had. Residuals have the same unit, so it stays.
        norm: of the latest gradient, before it was clipped.
        overflow: whether the present minibatch is left out, for an overflow.
    """

    def __init__(
        self,
        module: FlatModule,
        comm: Communicator,
        *,
        mean: bool,
        divides: bool,
        clip_norm: float | None,
        scaling: Scaling | None,
        overlap: Overlap | None,
        together: bool,
        gathered_flags: Callable[[], int],
        sum_late: Callable[[Array], None],
    ) -> None:
        self._module, self._comm, self._mean, self._clip_norm = module, comm, mean, clip_norm
        self._divides = divides
        self._scaling, self._overlap, self._together = scaling, overlap, together
        self._gathered_flags, self._sum_late = gathered_flags, sum_late
        self._under_way: deque[GradientUse] = deque()
        self._late = self.overflow = False
        self.unit = 0  # nothing has one yet
        self.norm: float | None = None

    def gather(self, samples: int) -> GradientUse:
        """Put this rank's gradients, counted by its samples, into the module's vector. Local.

        Raises:
            UserError: there are samples, but no gradients; or none, but gradients have been sent.
        """
        module, self._late, self.overflow = self._module, False, False
        if samples == 0:
            module.clear_gradients()
            if self._overlap is not None:
                self._overlap.require_nothing_sent()
                self._overlap.forget()
            return GradientUse([False] * len(module.tensors))
        factor = samples / self.unit if self._mean else 1.0
        if self._scaling:
            factor /= self._scaling.scale
        if self._overlap is None:
            used = module.gather(factor)
        else:
            used, self._late = self._overlap.gather(factor)
        if not any(used):
            raise UserError(
                f"samples={samples}, but backward has left no gradient in any parameter: call "
                "loss.backward() before each step, and no zero_grad() between the two"
            )
        if self._scaling:
            self.overflow = problem_with(module.gradient.flat) is not None
        return GradientUse(used)

    def settle_unit(self, samples: int, agree: Callable[[int], int]) -> None:
        """See that there is a unit: where ranks train together the samples of the first minibatch.

        Args:
            samples: of this rank in the present one.
            agree: sums a number over the ranks; called by all of them in their first steps.
        """
        if not self._divides:
            self.unit = 1
        elif not self._together:
            self.unit = samples or 1
        elif self.unit == 0:
            self.unit = agree(samples)  # still 0 where no rank has any

    def flags(self, used: GradientUse) -> int:
        """What the other ranks are to hear of the minibatch. Local."""
        return UNUSED * (not all(used.here)) + LATE * self._late

    def begin(self, used: GradientUse) -> None:
        """The gradient is under way. Local."""
        self._under_way.append(used)

    def skip(self, used: GradientUse) -> None:
        """No rank has a sample in this minibatch: its gradient, if any, will not be applied."""
        self._under_way = deque(other for other in self._under_way if other is not used)

    def forget(self) -> None:
        """No gradient is under way: training has failed. Local."""
        self._under_way.clear()

    def prepare(self, gradient: Array, samples: int) -> bool:
        """Complete and clip a sum over samples that the optimizer is about to be given.

        Returns:
            Whether it is to be applied.

        Collective where a part comes late, which all ranks know.
        """
        if self.overflow and not self._together:
            return False
        whole = as_tensor(gradient)
        if self._gathered_flags() >= LATE:
            assert self._overlap is not None
            late = self._overlap.late().flat
            self._sum_late(late)
            whole.add_(as_tensor(late))
        if self._clip_norm is not None:
            divisor = samples / self.unit if self._mean else 1
            self.norm = float(torch.linalg.vector_norm(whole)) / divisor
            factor = self._clip_norm / (self.norm + SMALL)
            if factor < 1:
                whole.mul_(factor)
        return True

    def used_by_any(self) -> Sequence[bool]:
        """Of the gradient that is about to be applied: which parameters have one, on any rank.

        Collective where the ranks have told each other that some lack one.
        """
        if not self._under_way:  # a checkpoint has brought the gradient
            return [True] * len(self._module.tensors)
        used = self._under_way.popleft()
        asked = self._gathered_flags() % LATE > 0 if used.agreed is None else used.agreed
        if not (self._together and asked):
            return used.here
        return [n > 0 for n in self._comm.sum_integers(np.array(used.here, np.int64)).tolist()]
