"""The models as PyTorch's modules, for both sides: initial values, loss and optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from parallel_sgd.models import MLP, ByteLanguageModel

from .contenders import MOMENTUM

Array = npt.NDArray[Any]

TESTED_AT_ONCE = 64  #: samples


def module_of(model: MLP | torch.nn.Module) -> tuple[list[str], Any]:
    """Return the names of a model's parameters, and the same model in PyTorch."""
    if isinstance(model, torch.nn.Module):
        return [name for name, _ in model.named_parameters()], model
    layers: list[Any] = []
    if isinstance(model, ByteLanguageModel):
        layers += [torch.nn.Embedding(256, model.width), torch.nn.Flatten()]
    for i, (inputs, outputs) in enumerate(zip(model.sizes, model.sizes[1:], strict=False)):
        layers += [torch.nn.ReLU()] * (i > 0) + [torch.nn.Linear(inputs, outputs)]
    module = torch.nn.Sequential(*layers)
    names = list(model.parameters)
    with torch.no_grad():
        for name, parameter in zip(names, module.parameters(), strict=True):
            parameter.copy_(torch.from_numpy(_transposed(name, model.parameters[name])))
    return names, module


def values_of(names: list[str], module: Any) -> Array:
    """Return the parameters as a vector, in the order and shapes of our models."""
    arrays = zip(names, module.parameters(), strict=True)
    return np.concatenate([_ours(name, p).reshape(-1) for name, p in arrays])


def _ours(name: str, parameter: Any) -> Array:
    return np.ascontiguousarray(_transposed(name, parameter.detach().numpy()))


def _transposed(name: str, array: Array) -> Array:
    """Transpose a layer's weights, [outputs, inputs] in PyTorch; return all else unchanged."""
    return array.T if name.startswith("W") else array


def optimizer_of(module: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=MOMENTUM, fused=True)


def loss_of(module: Any, x: Array, y: Array) -> torch.Tensor:
    """Return the mean loss over all labels, of each sample or of each of its places."""
    kind = np.float32 if x.dtype.kind == "f" else np.int64
    inputs, labels = (torch.from_numpy(array) for array in (x.astype(kind, copy=False), y))
    return functional.cross_entropy(module(inputs).flatten(0, y.ndim - 1), labels.flatten())


def test_loss(module: torch.nn.Module, values: Array, x: Array, y: Array) -> float:
    """Return the test loss of a module with these parameters."""
    module.eval()
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(torch.from_numpy(values), module.parameters())
        parts = range(0, len(x), TESTED_AT_ONCE)
        losses = [
            len(x[part]) * float(loss_of(module, x[part], y[part]))
            for part in (slice(i, i + TESTED_AT_ONCE) for i in parts)
        ]
    return sum(losses) / len(x)
