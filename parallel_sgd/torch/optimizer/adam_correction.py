"""Adam and AdamW of PyTorch's on gradients that an entropy code has quantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ... import second_moment
from ...kernels import empty_like
from ...kernels.reference import MOMENT_GROUP
from ..arrays import as_tensor
from ..module import FlatModule

Array = Any  #: a NumPy or CuPy array


def corrected_groups(optimizer: Any) -> list[Any]:
    """The parameter groups of an optimizer that are corrected. Local."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return []
    return [group for group in optimizer.param_groups if not group.get("amsgrad")]


class AdamCorrection:
    """After a step of PyTorch's, what `optimizers.Adam` does of itself: see there for equations.

    Args:
        optimizers: those other than Adam and AdamW, and groups with ``amsgrad``, stay as they are.
        module: whose parameters have their gradients still.
        correction: see `second_moment.learn`; changed.

    Local. Memory: some temporary tensors of the size of the largest parameter.
    """

    def __init__(
        self, optimizers: Iterable[Any], module: FlatModule, correction: dict[str, Array]
    ) -> None:
        self._module, self._correction = module, correction
        self._groups = {
            tensor: (optimizer.state[tensor], group)
            for optimizer in optimizers
            for group in corrected_groups(optimizer)
            for tensor in group["params"]
            if "step" in optimizer.state.get(tensor, ())
        }

    def correct(self, places: Sequence[slice]) -> None:
        """Move parameters from where a step of Adam has brought them to where a step with the
        correction would have.

        Args:
            places: of the values in the module's vector that are quantized.
        """
        if not self._correction:
            return
        slopes, shifts = (as_tensor(self._correction[name]) for name in ("slopes", "shifts"))
        with torch.no_grad():
            for tensor, begin in self._tensors():
                end = begin + tensor.numel()
                quantized = any(p.start <= begin and end <= p.stop for p in places)
                if tensor.grad is not None and quantized:
                    each = (_of_values(groups, begin, tensor) for groups in (slopes, shifts))
                    _correct(tensor, *self._groups[tensor], *each)

    def learn(self, projections: Array, step: int) -> None:
        """See `second_moment.learn`; beta2 is that of the first group."""
        if not self._groups:
            return
        sums = empty_like(projections, len(projections))
        sums.fill(0)
        with torch.no_grad():
            for tensor, begin in self._tensors():
                _add_to_groups(self._groups[tensor][0]["exp_avg_sq"], begin, as_tensor(sums))
        _, group = next(iter(self._groups.values()))
        values, beta2 = self._module.parameters.flat.size, float(group["betas"][1])
        second_moment.learn(self._correction, projections, sums, values, step, beta2)

    def _tensors(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Those to correct, with their places in the module's vector."""
        begin = 0
        for tensor in self._module.tensors.values():
            if tensor in self._groups:
                yield tensor, begin
            begin += tensor.numel()


def _of_values(groups: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """What groups have, for each value of a tensor that begins at a place of the vector."""
    first, before = divmod(begin, MOMENT_GROUP)
    end = before + like.numel()
    those = groups[first : first - (-end // MOMENT_GROUP)].repeat_interleave(MOMENT_GROUP)
    return those[before:end].view_as(like)


def _add_to_groups(values: torch.Tensor, begin: int, sums: torch.Tensor) -> None:
    """Add up a tensor that begins at a place of the vector."""
    first, before = divmod(begin, MOMENT_GROUP)
    after = -(before + values.numel()) % MOMENT_GROUP
    whole = torch.nn.functional.pad(values.reshape(-1), (before, after)).view(-1, MOMENT_GROUP)
    sums[first : first + len(whole)] += whole.sum(1)


def _correct(
    tensor: torch.Tensor, state: Any, group: Any, slopes: torch.Tensor, shifts: torch.Tensor
) -> None:
    (beta1, beta2), epsilon, t = group["betas"], group["eps"], float(state["step"])
    m, v = state["exp_avg"], state["exp_avg_sq"]
    bias1, bias2 = 1 - beta1**t, 1 - beta2**t
    root = ((slopes * v + shifts) / bias2).sqrt()
    root = torch.maximum(root, m.abs() / (bias1 * second_moment.LARGEST_MOVE))
    move = m / (root + epsilon) - m / ((v / bias2).sqrt() + epsilon)
    rate = group["lr"] / bias1
    tensor.add_(move * (rate if group.get("maximize") else -rate))
