"""What a session asks of a PyTorch model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data import Padded
from ..errors import UserError
from ..training import Learner as AnyLearner
from ..training.objective import Batch, Metric, measured, samples_in
from ..training.objective import Objective as AnyObjective
from ..validation import choice, kind_of
from .learner import Learner, Reduction
from .module import device_of

Loss = Callable[[Any, Any], torch.Tensor]


class Objective(AnyObjective):
    """A PyTorch model, its loss, and what it is judged by, for a `TrainingSession`.

    Args:
        model: the learner's.
        loss: given the model's outputs and the targets of some samples, their loss, a tensor of one
            value, as the functions of `torch.nn.functional` are.
        metrics: beside the loss, by name; each is given outputs and targets, too, and gives the
            mean over the samples.
        reduction: "mean" or "sum": what the loss is over the samples; the same as the learner's.
        dtype: of inputs that come from a data set, as floats.
        classes: that labels must be below; None: targets are any numbers.

    A minibatch is its inputs, and last its targets: ``model(*inputs)`` gives the outputs. NumPy's
    arrays become tensors on the model's device, also the two of `data.Padded` sequences. What does
    not fit that is a class of one's own, derived from `parallel_sgd.Objective`.

    Local.

    >>> import torch, parallel_sgd as psgd
    >>> model = torch.nn.Linear(4, 3)
    >>> objective = psgd.torch.Objective(
    ...     model,
    ...     torch.nn.functional.cross_entropy,
    ...     {"accuracy": lambda outputs, y: (outputs.argmax(1) == y).float().mean()},
    ... )
    >>> sorted(objective.evaluate((torch.zeros(2, 4), torch.tensor([0, 1]))))
    ['accuracy', 'loss']
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        metrics: Mapping[str, Metric] | None = None,
        *,
        reduction: Reduction = "mean",
        dtype: Any = np.float32,
        classes: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"model must be a torch.nn.Module: it is {kind_of(model)}")
        if not callable(loss):
            raise UserError(
                f"loss must be a function of outputs and targets: it is {kind_of(loss)}"
            )
        self.model, self.loss, self.metrics = model, loss, dict(metrics or {})
        self.dtype, self.classes = dtype, classes
        self.reduction = choice("reduction", reduction, ("mean", "sum"))

    def backward(self, learner: AnyLearner, pieces: Sequence[Batch]) -> Any:
        """See `parallel_sgd.training.Objective`."""
        if not isinstance(learner, Learner) or learner.model is not self.model:
            raise UserError("objective: its model must be that of the learner")
        if learner.reduction != self.reduction:
            raise UserError(
                f"reduction={self.reduction!r} of the objective must be the learner's, "
                f"{learner.reduction!r}"
            )
        samples = sum(map(samples_in, pieces))
        total: Any = 0.0
        if samples == 0:
            return total
        if not self.model.training:
            self.model.train()
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            outputs, targets = self._forward(piece)
            loss = self.loss(outputs, targets)
            total = total + self._sum(loss.detach(), samples_in(piece))
            if self.reduction == "mean" and len(pieces) > 1:
                loss = loss * (samples_in(piece) / samples)
            with nullcontext() if last else learner.no_sync():
                learner.scaled(loss).backward()
        return total

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """See `parallel_sgd.training.Objective`."""
        modes = [(part, part.training) for part in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                outputs, targets = self._forward(batch)
                samples = samples_in(batch)
                loss = self._sum(self.loss(outputs, targets), samples) / samples
                return {"loss": float(loss)} | measured(self.metrics, outputs, targets)
        finally:
            for part, training in modes:
                part.training = training

    def _forward(self, batch: Batch) -> tuple[Any, Any]:
        """The model's outputs, and what they should be."""
        *inputs, targets = (self._on_device(part) for part in batch)
        return self.model(*inputs), targets

    def _sum(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        return loss * samples if self.reduction == "mean" else loss

    def _on_device(self, part: Any) -> Any:
        if isinstance(part, Padded):
            return Padded(*map(self._on_device, part))
        if isinstance(part, np.ndarray):
            part = torch.from_numpy(part)
        return part.to(device_of(self.model)) if isinstance(part, torch.Tensor) else part
