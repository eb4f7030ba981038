"""Adam and AdamW of PyTorch's on gradients that an entropy code has quantized."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..optimizers import LARGEST_MOVE, NOISE
from .module import FlatModule


def correct_adam(
    optimizers: Iterable[Any],
    module: FlatModule,
    step_square: float,
    places: Sequence[slice],
    noise: float,
) -> float:
    """Move parameters from where a step of Adam has brought them to where a step that allows for
    quantization would have: see `optimizers.Adam`, whose equations these are.

    Args:
        optimizers: those other than Adam and AdamW, and groups with ``amsgrad``, stay as they are.
        module: whose parameters have their gradients still.
        step_square: the mean square of the codec's steps, of the gradients as Adam has had them.
        places: of the values in the module's vector that are quantized in steps.
        noise: the running mean of `step_square`, before this step.
    Returns:
        The running mean now, by the beta2 of the first group.

    Local. Memory: some temporary tensors of the size of the largest parameter.
    """
    groups = [
        (optimizer, group)
        for optimizer in optimizers
        if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        for group in optimizer.param_groups
        if not group.get("amsgrad")
    ]
    if not groups:
        return 0.0
    beta2 = float(groups[0][1]["betas"][1])
    noise += (1 - beta2) * (step_square - noise)
    quantized, begin = set(), 0
    for tensor in module.tensors.values():
        end = begin + tensor.numel()
        if any(place.start <= begin and end <= place.stop for place in places):
            quantized.add(tensor)
        begin = end
    with torch.no_grad():
        for optimizer, group in groups:
            for tensor in group["params"]:
                if tensor.grad is not None and tensor in quantized:
                    _correct(tensor, optimizer.state[tensor], group, NOISE * noise)
    return noise


def _correct(tensor: torch.Tensor, state: Any, group: Any, noise: float) -> None:
    (beta1, beta2), epsilon, t = group["betas"], group["eps"], float(state["step"])
    m, v = state["exp_avg"], state["exp_avg_sq"]
    bias1, bias2 = 1 - beta1**t, 1 - beta2**t
    root = v / ((v + noise) * bias2).sqrt()
    plain = (v / bias2).sqrt()
    root = torch.minimum(torch.maximum(root, m.abs() / (bias1 * LARGEST_MOVE)), plain)
    move = m / (root + epsilon) - m / (plain + epsilon)
    rate = group["lr"] / bias1
    tensor.add_(move * (rate if group.get("maximize") else -rate))
