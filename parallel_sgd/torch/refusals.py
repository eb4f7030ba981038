"""Refusals of models and optimizers unsuited to training, each with a one-line error."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..communication import Communicator
from ..errors import UserError
from ..validation import kind_of

DTYPES = (torch.float32, torch.float64)


def require_not_fault_tolerant(comm: Communicator, what: str) -> None:
    """Refuse fault-tolerant ranks: PyTorch's process group cannot continue after a failure. Local.

    Raises:
        UserError: the ranks are fault-tolerant.
    """
    comm.require_fixed_ranks(
        f"{what}: PyTorch's process group cannot continue without a failed rank: run without "
        "--survive, or train with psgd.torch.Learner"
    )


def require_plain(module: Any) -> None:
    """Refuse anything but a module held whole by every rank. Local.

    Raises:
        UserError: naming the unsuited part, and a replacement.
    """
    if not isinstance(module, nn.Module):
        raise UserError(f"model must be a torch.nn.Module: it is {kind_of(module)}")
    for part in module.modules():
        kind = type(part)
        if isinstance(part, torch.jit.ScriptModule):
            raise UserError(
                "model has a part made by torch.jit, whose parameters cannot be tracked: give the "
                "plain module, which torch.compile accepts"
            )
        if isinstance(part, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise UserError(
                f"model has a {kind.__name__}, which exchanges gradients itself: give the module "
                "that it wraps (model.module), or use parallel_sgd.torch.hook with it"
            )
        if any(
            base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in kind.__mro__
        ):
            raise UserError(
                "model is sharded by FSDP, so each rank holds a part: give "
                "psgd.torch.ShardedModel(model) for a model sharded by fully_shard inside each "
                "host; otherwise every rank must hold all parameters"
            )


def require_unchanged_by_forward(module: nn.Module) -> None:
    """Refuse parameters changed by a forward pass, since each rank has different samples. Local.

    Raises:
        UserError: an embedding has a `max_norm`.
    """
    for name, part in module.named_modules():
        embedding = isinstance(part, nn.Embedding | nn.EmbeddingBag)
        if embedding and part.max_norm is not None and part.weight.requires_grad:
            raise UserError(
                f"model has {type(part).__name__} {name!r} with max_norm={part.max_norm}: its "
                "forward changes the rows that a rank looks up, on that rank alone, so the ranks' "
                "models would differ; remove max_norm, and renormalize the whole weight on all "
                "ranks after each step"
            )


def require_dense(buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse buffers that cannot be sent, averaged and saved. Local.

    Raises:
        UserError: a buffer is sparse, quantized, or expanded.
    """
    for name, buffer in buffers:
        expanded = any(
            n > 1 and stride == 0 for n, stride in zip(buffer.shape, _strides(buffer), strict=False)
        )
        if buffer.layout != torch.strided or buffer.is_quantized or expanded:
            what = "expanded" if expanded else "quantized" if buffer.is_quantized else "sparse"
            raise UserError(
                f"buffer {name!r} is {what}, and must be a plain dense tensor; with "
                "register_buffer(..., persistent=False) each rank keeps its own"
            )


def _strides(buffer: torch.Tensor) -> Sequence[int]:
    return buffer.stride() if buffer.layout == torch.strided else ()


def require_equal(tensors: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that cannot be views of one vector. Local.

    Raises:
        UserError: there are none; a parameter is on another device, of another dtype, on `meta`,
            lazy, distributed, or sparse; or two parameters share memory.
    """
    if not tensors:
        raise UserError("model has no trainable parameter (requires_grad=True)")
    (first_name, first), *_ = tensors.items()
    places: dict[int, str] = {}
    for name, p in tensors.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise UserError(
                f"parameter {name!r} has no shape yet: call the lazy model once before making the "
                "learner"
            )
        if p.is_meta:
            raise UserError(
                f"parameter {name!r} is on the device meta, which holds no values: make the model "
                "on a device (model.to_empty) and give it its initial values"
            )
        if type(p.data) is not torch.Tensor or p.layout != torch.strided:
            raise UserError(
                f"parameter {name!r} is {kind_of(p.data)} of layout {p.layout}, which must be a "
                "plain dense tensor"
            )
        if p.dtype.is_complex:
            raise UserError(
                f"parameter {name!r} is {_short(p.dtype)}, and its gradient too: exchanges and "
                "optimizers have real numbers only. Keep the real parameter "
                "torch.view_as_real(...), and compute with torch.view_as_complex of it"
            )
        if p.dtype not in DTYPES or p.dtype != first.dtype:
            hint = "; keep float32 parameters and compute under torch.autocast"
            raise UserError(
                f"parameter {name!r} is {_short(p.dtype)}: all must be of one dtype, float32 or "
                f"float64 ({first_name!r} is {_short(first.dtype)}"
                + hint * (p.dtype.itemsize < 4 or first.dtype.itemsize < 4)
                + ")"
            )
        if p.device != first.device:
            raise UserError(
                f"parameter {name!r} is on {p.device}, but {first_name!r} on {first.device}: all "
                "must be on one device"
            )
        if p.numel() and (other := places.setdefault(p.data_ptr(), name)) != name:
            raise UserError(
                f"parameters {other!r} and {name!r} share memory, which the learner's vector "
                "cannot do: tie them by being the same Parameter (b.weight = a.weight)"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_optimizers_of(
    optimizers: Sequence[Any], names: Mapping[Any, str], tensors: Mapping[str, nn.Parameter]
) -> None:
    """Refuse optimizers that do not divide a model's parameters among them, or need more than a
    plain `step()`.

    Args:
        optimizers: of the learner.
        names: of all parameters.
        tensors: the trainable parameters.
    Raises:
        UserError: naming the parameter, or an optimizer's requirement.

    Local.
    """
    if not optimizers:
        raise UserError("optimizer must be a torch.optim.Optimizer, or a list of some: it is empty")
    holders: dict[Any, int] = {}
    for number, one in enumerate(optimizers):
        if not isinstance(one, torch.optim.Optimizer):
            what = (
                "optimizer must be a torch.optim.Optimizer or one of parallel_sgd's, such as "
                "SGD(lr=0.1)"
                if len(optimizers) == 1
                else f"optimizer[{number}] must be a torch.optim.Optimizer, as all in a list"
            )
            raise UserError(f"{what}: it is {kind_of(one)}")
        kind = type(one).__name__
        for earlier in range(number):
            if optimizers[earlier] is one:
                raise UserError(
                    f"optimizer[{earlier}] and optimizer[{number}] are the same {kind}: give each "
                    "optimizer once"
                )
        _require_plain_step(one, kind)
        for p in (p for group in one.param_groups for p in group["params"]):
            if p.requires_grad and p not in names:
                raise UserError(
                    f"optimizer {kind} has a parameter of shape {list(p.shape)} that is not in the "
                    "model: make the optimizer of model.parameters()"
                )
            other = holders.setdefault(p, number)
            if other != number:
                name = f"parameter {names[p]!r}" if p in names else "a frozen parameter"
                raise UserError(
                    f"{name} is in two optimizers, optimizer[{other}] "
                    f"({type(optimizers[other]).__name__}) and optimizer[{number}] ({kind}): give "
                    "each parameter to one of them"
                )
    lacking = next((name for name, p in tensors.items() if p not in holders), None)
    if lacking is not None:
        kinds = " + ".join(type(one).__name__ for one in optimizers)
        raise UserError(
            f"optimizer {kinds} lacks the model's parameter {lacking!r}: give this parameter to "
            "an optimizer, or freeze it before the learner is made (requires_grad_(False))"
        )


def _require_plain_step(optimizer: Any, kind: str) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"optimizer {kind} computes gradients itself, several times in a step: its step needs "
            "a closure, which has no place in an exchange of gradients"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError(
            "optimizer SparseAdam takes sparse gradients only, but sums over the ranks are dense: "
            "use Adam"
        )
