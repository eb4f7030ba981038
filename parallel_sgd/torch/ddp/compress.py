"""Compressed gradients for a DistributedDataParallel, by a single line and without MPI."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...communication import Communicator
from ...errors import UserError
from ...validation import kind_of
from .hook import checked_options, enabled, hook
from .state import HookState


def compress(
    ddp: torch.nn.Module,
    *,
    scaler: Any = None,
    timeout_s: float | None = None,
    **options: Any,
) -> HookState:
    """Compress the gradients that a DistributedDataParallel exchanges.

    Args:
        ddp: a DistributedDataParallel without a communication hook, before its first backward pass;
            also compiled by torch.compile. Its parameters are float32, or float64 with
            gradient_bits=32, and on one device.
        scaler: the torch.amp.GradScaler of the loss, if any.
        timeout_s: longest wait for other ranks, in seconds; default: see
            `Communicator.of_process_group`.
        options: see `ExchangeOptions`, such as gradient_bits=1. `bits_of` has the names of
            ``ddp.module.named_parameters()``. The clock of a schedule of bits
            (``{0: 32, 1000: 1}``) is the number of steps in which DDP has exchanged gradients.
    Returns:
        The state of the exchange: `report()`, `bytes_sent`, `state_dict()`, `load_state_dict()`,
        `close()`. Call `close` after training; DDP cannot train afterwards.
    Raises:
        UserError: there is no process group.
        SharedError: on all ranks: `ddp` is something else; an option is invalid, differs between
            ranks, or does not fit the parameters; or DDP has a communication hook already.

    The ranks are those of `ddp.process_group`, with connections of their own: no MPI is needed.
    Works with no_sync, find_unused_parameters, static_graph and gradient_as_bucket_view. If no rank
    has used a parameter in a step (with find_unused_parameters), DDP drops the residual sent for
    that parameter.

    Collective. Memory: see `exchange.Exchange`, for all buckets together.

        ddp = DistributedDataParallel(model)
        psgd.torch.compress(ddp, gradient_bits=4)
    """
    comm = Communicator.of_process_group(_group_of(ddp), timeout_s=timeout_s)
    try:
        wrapped = comm.together(lambda: required_ddp(ddp))
        chosen, named = checked_options(
            "compress", comm, wrapped, scaler, wrapped.process_group, options
        )
        state = HookState(comm, chosen, named, enabled(scaler), wrapped.process_group)
        comm.together(lambda: _register(wrapped, state))
    except UserError:
        comm.close()
        raise
    return state


def required_ddp(ddp: Any) -> DistributedDataParallel:
    """Return the DistributedDataParallel itself, if `ddp` is one or was compiled from one. Local.

    Raises:
        UserError: `ddp` is something else, or has another DistributedDataParallel within.
    """
    ddp = getattr(ddp, "_orig_mod", ddp)  # torch.compile's
    if not isinstance(ddp, DistributedDataParallel):
        raise UserError(
            f"ddp must be a torch.nn.parallel.DistributedDataParallel: it is {kind_of(ddp)}"
        )
    if any(isinstance(part, DistributedDataParallel) for part in ddp.module.modules()):
        raise UserError(
            "ddp has another DistributedDataParallel within, so gradients would be exchanged "
            "twice: wrap the model once"
        )
    return ddp


def _group_of(ddp: Any) -> Any:
    """Return DDP's process group. For anything else the default group, whose ranks all learn of the
    mistake; without a process group required_ddp's error is raised here."""
    if not dist.is_initialized():
        required_ddp(ddp)
    ddp = getattr(ddp, "_orig_mod", ddp)
    return ddp.process_group if isinstance(ddp, DistributedDataParallel) else None


def _register(ddp: DistributedDataParallel, state: HookState) -> None:
    try:
        ddp.register_comm_hook(state, hook)
    except RuntimeError as error:
        raise UserError(
            "ddp has a communication hook already: call compress once, without "
            "register_comm_hook, a trainer's option for a hook, or DDP's mixed_precision"
        ) from error
