"""A minibatch's gradients on their way from backward to the update, around their exchange."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..communication import Communicator
from ..compression import problem_with
from ..errors import UserError
from .arrays import as_tensor
from .module import FlatModule
from .overlap import Overlap
from .scaling import Scaling

Array = Any  #: a NumPy or CuPy array

UNUSED, LATE = 1, 1 << 20
"""Flags to all ranks: a parameter has no gradient on this rank; this rank has a late part."""

SMALL = 1e-6  #: added to a norm, as in `torch.nn.utils.clip_grad_norm_`


@dataclass
class GradientUse:
    """The parameters with a gradient on this rank, for a minibatch in flight.

    Attributes:
        local: for each parameter, whether this rank has a gradient.
        agreed: whether some rank lacks a gradient, so that the ranks exchange `local`; None until
            known.
    """

    local: Sequence[bool]
    agreed: bool | None = None


class Gradients:
    """Gather, weight, unscale, complete and clip the gradients of each minibatch.

    Args:
        module: the module of the gradients.
        comm: the ranks that train.
        mean: whether the loss is the mean over its samples; otherwise their sum.
        divides: whether the gradient is divided by samples, for an optimizer of mean gradients.
        clip_norm: the largest norm of a gradient for the optimizer; None: no clipping.
        scaling: the loss scale; None: no scaling.
        overlap: the overlapped exchange; None: no overlap.
        synchronous: whether all ranks agree on every minibatch.
        gathered_flags: returns the sum of all ranks' flags for the present minibatch.
        sum_late: sums a vector over the ranks.

    Attributes:
        unit: the number of samples represented by a gradient of 1 in the module's vector: see
            `settle_unit`. Residuals have the same unit, so the unit of synchronous ranks is
            constant.
        norm: of the latest gradient, before clipping.
        overflow: whether the present minibatch is skipped because of an overflow.
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
        synchronous: bool,
        gathered_flags: Callable[[], int],
        sum_late: Callable[[Array], None],
    ) -> None:
        self._module, self._comm, self._mean, self._clip_norm = module, comm, mean, clip_norm
        self._divides = divides
        self._scaling, self._overlap, self._synchronous = scaling, overlap, synchronous
        self._gathered_flags, self._sum_late = gathered_flags, sum_late
        self._in_flight: deque[GradientUse] = deque()
        self._late = self.overflow = False
        self.unit = 0  # unset
        self.norm: float | None = None

    def gather(self, samples: int) -> GradientUse:
        """Put this rank's gradients, weighted by its samples, into the module's vector. Local.

        Returns:
            The parameters with a gradient on this rank.
        Raises:
            UserError: there are samples but no gradients, or no samples but gradients have been
                sent.
        """
        module, self._late, self.overflow = self._module, False, False
        if samples == 0:
            module.clear_gradients()
            if self._overlap is not None:
                self._overlap.require_nothing_sent()
                self._overlap.reset()
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
                f"samples={samples}, but no parameter has a gradient: call loss.backward() before "
                "each step, and no zero_grad() in between"
            )
        if self._scaling:
            self.overflow = problem_with(module.gradient.flat) is not None
        return GradientUse(used)

    def settle_unit(self, samples: int, agree: Callable[[int], int]) -> None:
        """Set `unit` before a minibatch.

        Without a division by samples: 1. For independent ranks: this rank's samples. For
        synchronous ranks: the samples of all ranks in the first minibatch, so later minibatches of
        the same size need no division.

        Args:
            samples: of this rank in the present minibatch.
            agree: sums a number over the ranks; all synchronous ranks call it in their first steps.
        """
        if not self._divides:
            self.unit = 1
        elif not self._synchronous:
            self.unit = samples or 1
        elif self.unit == 0:
            self.unit = agree(samples)  # still 0 if no rank has samples

    def flags(self, used: GradientUse) -> int:
        """Return this rank's flags for the present minibatch. Local."""
        return UNUSED * (not all(used.local)) + LATE * self._late

    def begin(self, used: GradientUse) -> None:
        """Record a gradient as in flight. Local."""
        self._in_flight.append(used)

    def skip(self, used: GradientUse) -> None:
        """Drop the record of a minibatch whose gradient will not be applied. Local."""
        self._in_flight = deque(use for use in self._in_flight if use is not used)

    def reset(self) -> None:
        """Drop the records of all gradients in flight, after a failure. Local."""
        self._in_flight.clear()

    def prepare(self, gradient: Array, samples: int) -> bool:
        """Add late parts to a gradient sum and clip the result, just before the optimizer step.

        Args:
            gradient: sum over the samples of all ranks, in units of `unit`; changed in place.
            samples: of all ranks.
        Returns:
            Whether the gradient is to be applied.

        Collective if any rank has a late part, which the flags tell all ranks; otherwise local.
        """
        if self.overflow and not self._synchronous:
            return False
        whole = as_tensor(gradient)
        if self._gathered_flags() >= LATE:
            assert self._overlap is not None
            late = self._overlap.late().flat
            self._sum_late(late)
            whole.add_(as_tensor(late))
        if self._clip_norm is not None:
            divisor = samples / self.unit if self._mean else 1
            self.norm = self._module.norm(whole) / divisor
            factor = self._clip_norm / (self.norm + SMALL)
            if factor < 1:
                whole.mul_(factor)
        return True

    def used_by_any(self) -> Sequence[bool]:
        """Return, for each parameter, whether any rank has a gradient for the next update.

        Collective if the flags say that some rank lacks a gradient; otherwise local.
        """
        if not self._in_flight:  # the gradient is from a checkpoint
            return [True] * len(self._module.tensors)
        used = self._in_flight.popleft()
        exchange = self._gathered_flags() % LATE > 0 if used.agreed is None else used.agreed
        if not (self._synchronous and exchange):
            return used.local
        return [n > 0 for n in self._comm.sum_integers(np.array(used.local, np.int64)).tolist()]
