"""A model that FSDP2 shards inside each host, as the plain tensors of one rank.

FSDP2 averages gradients over the ranks of a host, and leaves each rank the gradients of its own
shards. Ranks of other hosts hold the same shards. Only such peers exchange gradients or models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ..errors import UserError
from ..validation import kind_of
from .sharding import Sharding

NOT_ELEMENTWISE = ("Adafactor", "Muon")  #: optimizers that need whole matrices

_sharded: WeakSet[nn.Module] = WeakSet()
"""Modules that belong to a `ShardedModel`."""

MESH = 'shard the model inside each host only, fully_shard(part, mesh=mesh["shard"])'


class ShardedModel(nn.Module):
    """A model sharded by FSDP2 inside each host, for training by a `Learner` between hosts.

    The parameters of a `ShardedModel` are plain tensors: this rank's shards, by the names of the
    model. An optimizer of these parameters holds the state of the shards only. ``forward`` copies
    the shards into FSDP's parameters and calls the model. Backward leaves FSDP's gradients, which
    are means over the ranks of a host, as gradients of the shards.

    Args:
        module: sharded by `torch.distributed.fsdp.fully_shard` over a mesh of one dimension, the
            ranks of a host. Every parameter must belong to such a mesh, and be float32 or float64.
            FSDP's settings (mixed precision, prefetching, resharding) and its methods, such as
            ``set_requires_gradient_sync``, work as usual.
    Raises:
        UserError: the module is not as required, or has BatchNorm, whose statistics FSDP leaves
            different on each rank.

    Attributes:
        sharding: how the model is divided; ``sharding.shard`` is this rank's number among the
            ranks that share a model, and ``sharding.shards`` is their number.

    Only public interfaces of PyTorch are used: `FSDPModule.reshard`, ``to_local``, and
    ``register_post_accumulate_grad_hook``, whose hooks FSDP2 calls for its sharded parameters.
    Local. Memory: a second copy of this rank's trainable shards. Cost: one copy of the shards in
    each forward.

        mesh = init_device_mesh("cpu", (hosts, 2), mesh_dim_names=("host", "shard"))
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh["shard"])
        model = psgd.torch.ShardedModel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        learner = psgd.torch.Learner(model, optimizer, psgd.DiLoCo(), comm)
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.sharding = Sharding(_mesh_of(module))
        if module in _sharded:
            raise UserError("module belongs to a ShardedModel already: use that one")
        _sharded.add(module)
        self._held = (module,)  # in a tuple: not a submodule, whose parameters are FSDP's
        self._parts = _parts_of(module)
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in module.named_parameters():
            trainable = parameter.requires_grad
            with torch.no_grad():
                local = parameter.to_local()
                shard = nn.Parameter(local.clone() if trainable else local, trainable)
            _place(self, name, shard)
            if trainable:
                self._pairs.append((parameter, shard))
                parameter.register_post_accumulate_grad_hook(_mover(shard))

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    @property
    def module(self) -> nn.Module:
        """The model, with the present values of the shards: for `torch.distributed.checkpoint`, and
        for methods other than ``forward``. Local.
        """
        (module,) = self._held
        if module.training != self.training:
            module.train(self.training)
        for part in self._parts:  # an evaluation may have left whole parameters of other values
            part.reshard()
        with torch.no_grad():
            for parameter, shard in self._pairs:
                parameter.to_local().copy_(shard)
        return module


def _mesh_of(module: Any) -> Any:
    """Return the mesh of all parameters of a module.

    Raises:
        UserError: see `ShardedModel`.
    """
    try:
        from torch.distributed.tensor import DTensor, Shard

        parts = _parts_of(module) if isinstance(module, nn.Module) else []
    except ImportError as error:
        raise UserError(f"ShardedModel needs PyTorch 2.6 or newer: {error}") from error
    if module not in parts:
        raise UserError(
            f"module must be sharded by torch.distributed.fsdp.fully_shard: it is {kind_of(module)}"
        )
    for place, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise UserError(
                f"module has {type(part).__name__} {place!r}, whose statistics would differ "
                "between the ranks that share a model: use a norm without them, such as LayerNorm"
            )
    for part in parts:
        part.reshard()
    mesh = None
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise UserError(
                f"parameter {name!r} is not sharded: {MESH}, also for the whole model, after its "
                "parts"
            )
        own = parameter.device_mesh
        if own.ndim != 1 or not isinstance(parameter.placements[0], Shard):
            raise UserError(
                f"parameter {name!r} has the placements {parameter.placements} on a mesh of "
                f"{own.ndim} dimensions: {MESH}"
            )
        if mesh is not None and own != mesh:
            raise UserError(f"parameter {name!r} is on another mesh than the first: {MESH}")
        mesh = own
    if mesh is None:
        raise UserError("module has no parameter")
    return mesh


def _parts_of(module: nn.Module) -> list[Any]:
    """Return the submodules to which `fully_shard` was applied."""
    from torch.distributed.fsdp import FSDPModule  # slow to import

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _place(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under its dotted name, below modules made for that purpose."""
    *path, last = name.split(".")
    if hasattr(ShardedModel, (first := name.split(".")[0])) or first == "sharding":
        raise UserError(f"parameter {name!r}: a ShardedModel cannot hold a part named {first!r}")
    owner = root
    for part in path:
        if part not in dict(owner.named_children()):
            owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter(last, parameter)


def _mover(shard: nn.Parameter) -> Callable[[torch.Tensor], None]:
    """Return a hook that moves the gradient of FSDP's parameter to a shard."""

    def move(parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        parameter.grad = None
        with torch.no_grad():
            local = gradient.to_local()
        shard.backward(local)  # calls the shard's own hooks

    return move
