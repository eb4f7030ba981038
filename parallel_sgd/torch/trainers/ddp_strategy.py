"""Compressed gradients in Lightning's DDPStrategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...warning import warn
from ..ddp.compress import compress
from ..ddp.gathered_state import GatheredState
from ..ddp.state import HookState

KEY = "parallel_sgd"  #: in Lightning's checkpoints


class Compressed:
    """Compress the gradients of a DDPStrategy: a base class in front of DDPStrategy.

    Args:
        exchange: options of the exchange.
        timeout_s: of `compress`.
        arguments: of DDPStrategy.

    Attributes:
        handle: the state of the exchange, as returned by `compress`; None before the first fit.
    """

    def __init__(
        self, *, exchange: Mapping[str, Any], timeout_s: float | None = None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.handle: HookState | None = None
        self._exchange, self._timeout_s = dict(exchange), timeout_s
        self._fitted: Any = None  #: the module whose gradients `handle` compresses

    def configure_ddp(self) -> None:
        """Wrap the model, and compress its gradients. Lightning calls this in each fit.
        Collective.
        """
        super().configure_ddp()  # type: ignore[misc]
        this: Any = self
        before, module = self.handle, this.lightning_module
        self.handle = compress(
            this.model,
            scaler=getattr(this.precision_plugin, "scaler", None),
            timeout_s=self._timeout_s,
            **self._exchange,
        )
        if before is not None:
            if module is self._fitted:  # another fit of the same model
                self.handle.load_state_dict(before.state_dict())
            before.close()
        self._fitted = module

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **named: Any) -> None:
        """Save a checkpoint with the residuals of all ranks. Collective."""
        if self.handle is not None and "optimizer_states" in checkpoint:
            checkpoint[KEY] = GatheredState(self.handle).state_dict()
        super().save_checkpoint(checkpoint, *arguments, **named)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states and the residuals. Collective."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        assert self.handle is not None
        if KEY in checkpoint:
            GatheredState(self.handle).load_state_dict(checkpoint[KEY])
        elif self.handle.comm.rank == 0:
            warn("LightningStrategy: the checkpoint has no residuals, so they begin with zeros")
