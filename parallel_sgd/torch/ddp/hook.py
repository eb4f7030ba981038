"""The communication hook for DistributedDataParallel, and its state.

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(psgd.torch.hook_state(comm=comm, gradient_bits=1), psgd.torch.hook)

DDP calls the hook for each bucket as soon as backward has filled the bucket. A thread sums the
buckets in order, while backward continues. The call for the last bucket waits for all sums, so that
errors are raised there. (DDP reports an error in a Future without a useful message.)
"""

# Annotations are not postponed in this file: DDP compares a hook's own with the types themselves.
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...communication import Communicator
from ...errors import UserError
from ...exchange import ExchangeOptions
from ...options import require_options, values_of
from ...validation import kind_of, shown
from ..refusals import require_not_fault_tolerant
from ..scaling import require_scaler
from .buckets import require_dtype
from .state import HookState, require_ranks_of

COMPILED = "_orig_mod."  #: part of a parameter's name within a module made by torch.compile


def hook(
    state: object, bucket: dist.GradBucket, *more: object
) -> torch.futures.Future[torch.Tensor]:
    """Start the sum of a DDP bucket over all ranks; DDP calls this hook for each bucket.

    Args:
        state: a `HookState`.
        bucket: DDP's; its gradients become the mean over the ranks, in place.
        more: must be empty; FSDP passes further arguments to its hooks.
    Returns:
        A Future of the bucket's buffer.
    Raises:
        UserError: the caller is not DDP's own reducer, or the buckets cannot be exchanged.
        SharedError: as in `HookState.begin`.

    Collective.
    """
    if not isinstance(state, HookState):
        raise UserError(
            f"state={shown(state)} must be what psgd.torch.hook_state(...) returns: it is "
            f"{kind_of(state)}"
        )
    if more or not isinstance(bucket, dist.GradBucket):
        raise UserError(
            "psgd.torch.hook is for the buckets of DistributedDataParallel: here it got "
            f"{kind_of(bucket)}, as from FSDP, or with "
            "torch._dynamo.config.optimize_ddp='python_reducer'"
        )
    return state.begin(bucket)


def hook_state(
    comm: Communicator | None = None,
    *,
    module: torch.nn.Module | None = None,
    scaler: Any = None,
    process_group: Any = None,
    **options: Any,
) -> HookState:
    """Return the state of `hook`: the exchanges of DDP's buckets, and their residuals.

    Args:
        comm: the ranks, equal to those of DDP's process group.
        module: DDP's module, or DDP itself. Gives `bits_of` and `state_dict` the names of
            parameters, and checks all parameters here. None: parameters are numbered in the order
            of DDP's first buckets: "0", "1", ...
        scaler: the torch.amp.GradScaler of the loss, if any.
        process_group: DDP's, unless the default one.
        options: see `ExchangeOptions`, such as gradient_bits=1. The clock of a schedule of bits
            (``{0: 32, 1000: 1}``) is the number of steps in which DDP has called the hook.
    Raises:
        SharedError: an option is invalid, differs between ranks, or does not fit the module; the
            process group has a different size; or the ranks are fault-tolerant (`run --survive`).

    If no rank has used a parameter in a step (with find_unused_parameters), DDP drops the residual
    sent for that parameter.

    Collective. Memory: see `exchange.Exchange`, for all buckets together.
    """
    if not isinstance(comm, Communicator):
        raise UserError(
            f"comm={shown(comm)} must be the ranks, such as psgd.Communicator.world(): it is "
            f"{kind_of(comm)}"
        )

    chosen, named = checked_options("hook_state", comm, module, scaler, process_group, options)
    return HookState(comm.duplicate(), chosen, named, enabled(scaler), process_group)


def checked_options(
    door: str,
    comm: Communicator,
    module: torch.nn.Module | None,
    scaler: Any,
    process_group: Any,
    options: Mapping[str, Any],
) -> tuple[ExchangeOptions, dict[str, torch.Tensor] | None]:
    """Return the options of all exchanges, and the module's trainable parameters by name.

    Args:
        door: the name of the function with these arguments, for errors.
        comm, module, scaler, process_group, options: see `hook_state`.
    Raises:
        SharedError: see `hook_state`.

    Collective.
    """

    def checked() -> tuple[ExchangeOptions, dict[str, torch.Tensor] | None]:
        if scaler is not None:
            require_scaler(scaler)
        if not isinstance(process_group, dist.ProcessGroup | None):
            raise UserError(
                "process_group must be one of torch.distributed's, or None: it is "
                f"{kind_of(process_group)}"
            )
        require_not_fault_tolerant(comm, door)
        require_options(door, ExchangeOptions, options)
        chosen = ExchangeOptions(**options)
        require_ranks_of(process_group, comm)
        return chosen, checked_parameters(module, chosen)

    chosen, named = comm.together(checked)
    devices = {parameter.device.type for parameter in (named or {}).values()}
    comm.require_agreement(
        {
            **values_of(chosen),
            "whether there is a scaler": enabled(scaler) is not None,
            "the device of the module's parameters": ", ".join(devices),
        }
    )
    return chosen, named


def enabled(scaler: Any) -> Any:
    """Return a GradScaler that is enabled, or None. Local."""
    return scaler if scaler is not None and scaler.is_enabled() else None


def checked_parameters(
    module: torch.nn.Module | None, options: ExchangeOptions
) -> dict[str, torch.Tensor] | None:
    """Return a module's trainable parameters by name; None without a module.

    Parameters that DDP ignores are left out, and names do not show that a part was compiled.

    Raises:
        UserError: the options do not allow an exchange of the parameters, or these are on several
            devices.
    """
    if module is None:
        for pattern in options.bits_of:
            if not pattern.startswith("<"):
                raise UserError(f"bits_of: {pattern!r} is of names: it needs module=, DDP's module")
        return None
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"module must be DDP's torch.nn.Module, or None: it is {kind_of(module)}")
    ignored: Collection[str] = ()
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        ignored, module = module.parameters_to_ignore, module.module
    named = {
        name.replace(COMPILED, ""): p
        for name, p in module.named_parameters()
        if p.requires_grad and (name if "." in name else f".{name}") not in ignored  # as DDP
    }
    options.bits_of.require_matches("bits_of", {name: p.numel() for name, p in named.items()})
    for name, parameter in named.items():
        require_dtype(f"parameter {name!r}", parameter.dtype, options)
    devices: dict[str, str] = {}  #: the first parameter on each
    for name, parameter in named.items():
        devices.setdefault(str(parameter.device), name)
    if len(devices) > 1:
        (one, first), (other, second), *_ = devices.items()
        raise UserError(
            f"parameter {first!r} is on {one}, but {second!r} on {other}: all must be on one device"
        )
    return named
