"""The state of DDP's hook on all ranks, for programs that save a checkpoint on rank 0 alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import UserError
from ...validation import kind_of, shown
from .state import HookState

STATES = "states"


class GatheredState:
    """The residuals of all ranks as the state of one object.

    Args:
        handle: as returned by `compress`.

    Residuals differ between ranks. Some programs save states on rank 0 alone, such as Accelerate:

        handle = psgd.torch.compress(ddp, gradient_bits=4)
        accelerator.register_for_checkpointing(psgd.torch.GatheredState(handle))
    """

    def __init__(self, handle: HookState) -> None:
        if not isinstance(handle, HookState):
            raise UserError(
                f"handle must be what psgd.torch.compress(...) returns: it is {kind_of(handle)}"
            )
        self.handle = handle

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, and no states on the remaining ranks; see
        `HookState.gathered_state_dicts`. Collective.
        """
        return {STATES: self.handle.gathered_state_dicts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore rank 0's result of `state_dict`, on any number of ranks; see
        `HookState.load_state_dict`. Collective.

        Raises:
            SharedError: on all ranks: the state is something else, or does not fit.
        """
        self.handle.load_state_dict(_states(state))


def _states(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the states of all ranks. `HookState.load_state_dict` raises an error on all ranks."""
    if not isinstance(state, Mapping) or not state.get(STATES):
        raise UserError(f"state={shown(state)} must be rank 0's result of state_dict()")
    yield from state[STATES]
