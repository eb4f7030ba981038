"""The loss scale of 16-bit gradients, decided on by all ranks together."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UserError
from ..validation import shown


def require_scaler(scaler: Any) -> None:
    """Refuse what is no `torch.amp.GradScaler`. Local.

    Raises:
        UserError: it is not one.
    """
    if not isinstance(scaler, torch.amp.GradScaler):
        raise UserError(f"scaler={shown(scaler)} must be a torch.amp.GradScaler, or None")


class Scaling:
    """A `torch.amp.GradScaler` at work, by its public functions alone.

    It is told of each minibatch, whether it overflowed, through a parameter of its own: the ranks
    see overflows themselves, before they exchange anything.

    Args:
        scaler: it.
        device: of the model.

    Local.
    """

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self.scaler = scaler
        self._flag = torch.nn.Parameter(torch.zeros(1, device=device))
        self._flag_optimizer = torch.optim.SGD([self._flag], lr=0.0)

    @property
    def scale(self) -> float:
        """By which gradients are too large now."""
        return float(self.scaler.get_scale())

    def require_scaled(self, optimizer: Any) -> None:
        """See that gradients still are as large as `scale` says.

        Args:
            optimizer: PyTorch's, whose gradients are taken away from it for the moment.
        Raises:
            UserError: the scaler has unscaled them.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        if not self.scaler.is_enabled() or all(gradient is None for gradient in gradients):
            return
        try:
            for p in parameters:
                p.grad = None
            self.scaler.unscale_(optimizer)  # nothing; but it refuses to be called twice
        except RuntimeError as error:
            raise UserError(
                "scaler.unscale_(optimizer) was called, but learner.step() unscales gradients: "
                "leave it out; to clip the gradient of all ranks give the learner clip_norm=..."
            ) from error
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient

    def reset(self) -> None:
        """The minibatch has not come to an end: forget that its gradients were looked at."""
        if self.scaler.is_enabled():
            self.scaler.scale(self._flag.detach())
            self.scaler.update(self.scale)

    def update(self, *, overflow: bool) -> None:
        """The minibatch is over: a new scale, by the scaler's own rule."""
        if not self.scaler.is_enabled():
            return
        self.scaler.scale(self._flag.detach())  # on a rank that has had no loss yet
        self._flag.grad = torch.full_like(self._flag, float("inf") if overflow else 0.0)
        self.scaler.unscale_(self._flag_optimizer)
        self.scaler.step(self._flag_optimizer)
        self.scaler.update()
