"""The objective of a training session for PyTorch models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data import Padded
from ..data.validation import float_dtype
from ..errors import UserError
from ..training import Learner as AnyLearner
from ..training.session.batches import Batch, Samples, mapped, samples_in
from ..training.session.objective import Metric, checked_metrics, measured
from ..training.session.objective import Objective as AnyObjective
from ..validation import choice, function, integer, kind_of
from .adapter import Reduction
from .learner import Learner
from .module import device_of

Loss = Callable[[Any, Any], torch.Tensor]


class Objective(AnyObjective):
    """A PyTorch model with its loss and metrics, for a `TrainingSession`.

    Args:
        model: the learner's.
        loss: maps the model's outputs and the targets of some samples to their loss, a tensor of
            one value, as the functions of `torch.nn.functional` do.
        metrics: further metrics by name. Each maps outputs and targets to the mean over the
            samples.
        reduction: "mean" or "sum": how the loss reduces over the samples; equal to the learner's.
        dtype: floating-point type of inputs from a data set.
        classes: upper bound of labels (exclusive); None: targets are any numbers.
        samples: maps a minibatch to this rank's number of samples in it, over which `loss` is the
            mean or the sum. None: the length of the first axis, which must be equal in all tensors;
            for a PackedSequence the number of sequences or of tokens, whichever equals the length
            of the targets; for `data.Padded` the number of tokens (with reduction="sum" whatever
            the targets are).
    Raises:
        UserError: an argument is not as required.

    A minibatch is a sequence of inputs, followed by targets: ``model(*inputs)`` gives the outputs.
    An input may be nested tuples, lists and mappings of tensors, to any depth. NumPy arrays become
    tensors on the model's device, including both arrays of `data.Padded` sequences. For anything
    else derive your own class from `parallel_sgd.Objective`.

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
        samples: Samples | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"model must be a torch.nn.Module: it is {kind_of(model)}")
        function("loss", loss, "of outputs and targets")
        if samples is not None:
            function("samples", samples, "of a batch")
        self.model, self.loss, self.metrics = model, loss, checked_metrics(metrics)
        self.dtype = float_dtype(dtype)
        self.classes = None if classes is None else integer("classes", classes, 1)
        self._samples = samples
        self.reduction = choice("reduction", reduction, ("mean", "sum"))

    def samples_of(self, batch: Batch) -> int:
        """See `parallel_sgd.training.Objective`."""
        if self._samples is None and self.reduction == "sum" and isinstance(batch[0], Padded):
            return batch[0].tokens
        return samples_in(batch, self._samples)

    def backward(self, learner: AnyLearner, pieces: Sequence[Batch]) -> Any:
        """See `parallel_sgd.training.Objective`."""
        if not isinstance(learner, Learner) or learner.model is not self.model:
            raise UserError("model of the objective must be the model of the learner")
        if learner.reduction != self.reduction:
            raise UserError(
                f"reduction={self.reduction!r} of the objective must be the learner's, "
                f"{learner.reduction!r}"
            )
        counts = [self.samples_of(piece) for piece in pieces]
        samples = sum(counts)
        total: Any = 0.0
        if samples == 0:
            return total
        if not self.model.training:
            self.model.train()
        for i, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
            last = i == len(pieces) - 1
            loss, _, _ = self._loss(piece)
            if not loss.requires_grad:
                raise UserError(
                    "loss returned a tensor without a gradient: it must be computed from the "
                    "model's outputs"
                )
            total = total + self._sum(loss.detach(), count)
            if self.reduction == "mean" and len(pieces) > 1:
                loss = loss * (count / samples)
            with nullcontext() if last else learner.no_sync():
                learner.scaled(loss).backward()
        return total

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """See `parallel_sgd.training.Objective`."""
        modes = [(part, part.training) for part in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                loss, outputs, targets = self._loss(batch)
                samples = self.samples_of(batch)
                loss = self._sum(loss, samples) / samples
                return {"loss": float(loss)} | measured(self.metrics, outputs, targets)
        finally:
            for part, training in modes:
                part.training = training

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, Any, Any]:
        """Return the loss of some samples, the model's outputs, and the targets.

        Raises:
            UserError: the loss is no tensor of one value.
        """
        *inputs, targets = (mapped(self._on_device, part) for part in batch)
        outputs = self.model(*inputs)
        loss = self.loss(outputs, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = "" if not isinstance(loss, torch.Tensor) else f" of shape {list(loss.shape)}"
            raise UserError(
                f"loss must return a tensor of one value, the {self.reduction} over the samples: "
                f"it returned {kind_of(loss)}{what}"
            )
        return loss, outputs, targets

    def _sum(self, loss: torch.Tensor, samples: int) -> torch.Tensor:
        return loss * samples if self.reduction == "mean" else loss

    def _on_device(self, part: Any) -> Any:
        device = device_of(self.model)
        if isinstance(part, Padded):
            return Padded(*map(self._on_device, part))
        if isinstance(part, np.ndarray):
            part = torch.from_numpy(part)
        moves = isinstance(part, torch.Tensor | nn.utils.rnn.PackedSequence)
        return part.to(device) if moves else part
