"""Objectives, seeds and initial values for PyTorch models given by the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import UserError
from ..training.session.initial_model import require_finite, require_shapes
from ..training.session.objective import Metric
from ..validation import kind_of
from .arrays import host_array
from .module import buffers_of, plain_name, tensors_of
from .objective import Loss, Objective


def objective_for(
    model: Any,
    task: str,
    classes: int | None,
    *,
    device: str = "cpu",
    values: Mapping[str, Any] | None = None,
    name: str = "initial_model",
) -> Objective:
    """Return the objective of a module for a task of `parallel_sgd.data`.

    Args:
        model: a module; moved to `device`.
        task: "classification", "regression", or "multi-label".
        classes: the number of classes, for tasks with labels.
        device: PyTorch's name of a device.
        values: initial parameters and buffers, by name; None: unchanged.
        name: where `values` were read from, for errors.
    Raises:
        UserError: the model is no module, or the values are for another module.

    Local.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"it must be a torch.nn.Module or a Model: it is {kind_of(model)}")
    model = model.to(device)
    if values is not None:
        set_values(model, values, name=name)
    loss, metrics = task_loss(task)
    doubles = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    dtype = np.float64 if doubles else np.float32
    return Objective(model, loss, metrics, dtype=dtype, classes=classes)


def outputs_of(model: nn.Module, x: Any) -> Any:
    """Return a module's outputs in `eval` mode, as a NumPy array [m, outputs].

    Args:
        x: [m, …], an array; moved to the module's device.

    Local.
    """
    model.eval()
    device = next(model.parameters()).device
    with torch.no_grad():
        return host_array(model(torch.from_numpy(x).to(device)))


def seed_initial_values(seed: int) -> None:
    """Seed PyTorch's generators for a model's initial values, equally on all ranks. Local; affects
    the whole process.
    """
    torch.manual_seed(seed % 2**63)


def seed_training(seed: int, rank: int) -> None:
    """Seed PyTorch's generators for training, such as dropout's, differently on each rank. Local;
    affects the whole process.
    """
    own = np.random.SeedSequence([seed, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(own[0]))


def task_loss(task: str) -> tuple[Loss, dict[str, Metric]]:
    """Return the loss and the metrics of a task of `parallel_sgd.data`. Local."""
    functional = torch.nn.functional
    if task == "classification":
        return functional.cross_entropy, {"accuracy": _accuracy}
    if task == "regression":
        return _squared_error, {"absolute_error": _absolute_error}
    return _label_loss, {"label_accuracy": _label_accuracy}


def _accuracy(outputs: Any, y: Any) -> Any:
    return (outputs.argmax(1) == y).float().mean()


def _squared_error(outputs: Any, y: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, y.reshape(outputs.shape))


def _absolute_error(outputs: Any, y: Any) -> Any:
    return (outputs - y.reshape(outputs.shape)).abs().mean()


def _label_loss(outputs: Any, y: Any) -> torch.Tensor:
    y = y.reshape(outputs.shape).to(outputs.dtype)
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs, y)


def _label_accuracy(outputs: Any, y: Any) -> Any:
    return ((outputs > 0) == (y.reshape(outputs.shape) != 0)).float().mean()


def set_values(model: nn.Module, values: Mapping[str, Any], *, name: str) -> None:
    """Set a model's parameters and buffers, before its learner is made.

    Args:
        values: an array for each, by name, as from `Learner.model_arrays`.
        name: where the values were read from, for errors.
    Raises:
        UserError: names or shapes differ, a trainable parameter is not finite, or a buffer has
            another kind of dtype; the model is then unchanged.

    Local.
    """
    tensors, kinds = tensors_of(model), dict.fromkeys(dict(buffers_of(model)), "buffer")
    require_shapes({k: t.shape for k, t in tensors.items()}, values, name=name, kinds=kinds)
    for key, p in model.named_parameters():
        if p.requires_grad:
            require_finite(plain_name(key), values[plain_name(key)], name=name)
    dtypes = {key: host_array(tensor.flatten()[:0]).dtype for key, tensor in tensors.items()}
    for key, dtype in dtypes.items():
        if values[key].dtype.kind != dtype.kind:
            what = kinds.get(key, "parameter")
            raise UserError(
                f"{name}: its {what} {key} is of {values[key].dtype}, but here of {dtype}"
            )
    for key, tensor in tensors.items():
        tensor.copy_(torch.from_numpy(values[key].astype(dtypes[key])))
