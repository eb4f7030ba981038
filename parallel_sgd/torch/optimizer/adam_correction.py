"""Corrected steps of PyTorch's Adam and AdamW for gradients quantized by an entropy code."""

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
    """Return an optimizer's parameter groups with a correction. Local."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return []
    return [group for group in optimizer.param_groups if not group.get("amsgrad")]


class AdamCorrection:
    """Correct a step of PyTorch's Adam, as `optimizers.Adam` does: see there for the equations.

    Args:
        optimizers: PyTorch's. Optimizers besides Adam and AdamW, and groups with ``amsgrad``, are
            not corrected. If a group of 64 values has some of their values, Adam's values there are
            taken to have the mean square of the group.
        module: the module; its parameters must still have their gradients.
        correction: see `second_moment.learn`; changed.

    Local. Memory: some temporary tensors of the size of the largest parameter.
    """

    def __init__(
        self, optimizers: Iterable[Any], module: FlatModule, correction: dict[str, Array]
    ) -> None:
        self._module, self._correction = module, correction
        held = [
            (tensor, optimizer.state, group)
            for optimizer in optimizers
            for group in corrected_groups(optimizer)
            for tensor in group["params"]
        ]
        self._groups = {
            tensor: (state[tensor], group)
            for tensor, state, group in held
            if "step" in state.get(tensor, ())
        }
        self._others = {*module.tensors.values()}.difference(tensor for tensor, _, _ in held)

    def correct(self, places: Sequence[slice]) -> None:
        """Move parameters from the result of an Adam step to the result of a corrected step.

        Args:
            places: the quantized values in the module's vector.
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
        """Call `second_moment.learn`, with beta2 of the first corrected group."""
        if not self._groups:
            return
        sums = empty_like(projections, len(projections))
        sums.fill(0)
        with torch.no_grad():
            for tensor, begin in self._tensors():
                _add_to_groups(self._groups[tensor][0]["exp_avg_sq"], begin, as_tensor(sums))
            if self._others:
                as_tensor(sums).mul_(self._factors(as_tensor(sums)))
        _, group = next(iter(self._groups.values()))
        values, beta2 = self._module.parameters.flat.size, float(group["betas"][1])
        second_moment.learn(self._correction, projections, sums, values, step, beta2)

    def _factors(self, like: torch.Tensor) -> torch.Tensor:
        """Return, for each group of 64, the factor from the sum over its Adam values to the sum
        over all its values; 1 if there are no Adam values.
        """
        sizes, others = torch.full_like(like, MOMENT_GROUP), torch.zeros_like(like)
        sizes[-1:] -= -self._module.parameters.flat.size % MOMENT_GROUP
        for tensor, begin in self._places():
            if tensor in self._others and tensor.numel():
                first, before = divmod(begin, MOMENT_GROUP)
                last, place = divmod(begin + tensor.numel() - 1, MOMENT_GROUP)
                others[first : last + 1] += MOMENT_GROUP
                others[first] -= before
                others[last] -= MOMENT_GROUP - 1 - place
        return torch.where(others < sizes, sizes / (sizes - others), 1.0)

    def _tensors(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield each corrected parameter, with its position in the module's vector."""
        return ((tensor, begin) for tensor, begin in self._places() if tensor in self._groups)

    def _places(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield each parameter, with its position in the module's vector."""
        begin = 0
        for tensor in self._module.tensors.values():
            yield tensor, begin
            begin += tensor.numel()


def _of_values(groups: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Expand values per group to values per element, for a tensor at position `begin` of the
    vector.
    """
    first, before = divmod(begin, MOMENT_GROUP)
    end = before + like.numel()
    expanded = groups[first : first - (-end // MOMENT_GROUP)].repeat_interleave(MOMENT_GROUP)
    return expanded[before:end].view_as(like)


def _add_to_groups(values: torch.Tensor, begin: int, sums: torch.Tensor) -> None:
    """Add the values of a tensor at position `begin` of the vector to the groups' sums."""
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
