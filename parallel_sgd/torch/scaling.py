"""The loss scale of 16-bit gradients: a GradScaler driven by all ranks together."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UserError
from ..validation import shown


def require_scaler(scaler: Any) -> None:
    """Require a `torch.amp.GradScaler`. Local.

    Raises:
        UserError: the value has another type.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise UserError(f"scaler={shown(scaler)} must be a torch.amp.GradScaler, or None")


class Scaling:
    """Drive a `torch.amp.GradScaler` through its public functions alone.

    The ranks detect overflows themselves, before they exchange gradients. The scaler learns of each
    minibatch's overflow through the gradient of a parameter of this class.

    Args:
        scaler: the GradScaler.
        device: of the model.

    Local.
    """

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self.scaler = scaler
        self._flag = torch.nn.Parameter(torch.zeros(1, device=device))
        self._flag_optimizer = torch.optim.SGD([self._flag], lr=0.0)

    @property
    def scale(self) -> float:
        """The present factor of the loss, and so of gradients."""
        return float(self.scaler.get_scale())

    def require_scaled(self, optimizer: Any) -> None:
        """Check that gradients still have the factor `scale`.

        Args:
            optimizer: PyTorch's. Its gradients are set to None for the duration of the check.
        Raises:
            UserError: the scaler has already unscaled the gradients.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        if not self.scaler.is_enabled() or all(gradient is None for gradient in gradients):
            return
        try:
            for p in parameters:
                p.grad = None
            self.scaler.unscale_(optimizer)  # unscales nothing, but fails on a second call
        except RuntimeError as error:
            raise UserError(
                "scaler.unscale_(optimizer) was called, but learner.step() unscales gradients: "
                "remove this call; to clip the gradient of all ranks give the learner clip_norm=..."
            ) from error
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient

    def reset(self) -> None:
        """Discard the scaler's record of an unfinished minibatch."""
        if self.scaler.is_enabled():
            self.scaler.scale(self._flag.detach())
            self.scaler.update(self.scale)

    def update(self, *, overflow: bool) -> None:
        """Update the scale at the end of a minibatch, by the scaler's own rule.

        Args:
            overflow: whether a gradient of any rank has overflowed.
        """
        if not self.scaler.is_enabled():
            return
        self.scaler.scale(self._flag.detach())  # initializes a scaler without a loss so far
        self._flag.grad = torch.full_like(self._flag, float("inf") if overflow else 0.0)
        self.scaler.unscale_(self._flag_optimizer)
        self.scaler.step(self._flag_optimizer)
        self.scaler.update()
