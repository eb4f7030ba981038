"""What a model remembers beside its parameters: buffers, the random generator, the loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from ..communication import Communicator
from ..errors import UserError
from ..state import Component, across, workspace
from .arrays import as_array, as_tensor
from .gradients import Gradients
from .module import FlatModule, buffers_of, layout_of_buffers

Array = Any  #: a NumPy or CuPy array

Buffers = Literal["mean", "first", "local"]
BUFFERS = get_args(Buffers)


@dataclass
class ModelState(Component):
    """A module's buffers, and what else of PyTorch's a rank goes on with.

    Attributes:
        buffers: of numbers with a point, by name: the statistics of BatchNorm, say.
        counters: the other buffers.
        random: the state of PyTorch's generators of this rank, on the CPU and the model's GPU.
        scale: of a GradScaler's, by the names in its `state_dict`.
        unit: of gradients and residuals: see `Gradients`.
        frozen: a checksum of the parameters that are not trained.
        module, scaler, gradients: at work.
    """

    buffers: dict[str, Array] = across("mean", default_factory=dict)
    counters: dict[str, Array] = across("same", default_factory=dict)
    random: dict[str, Array] = across("drop", default_factory=dict)
    scale: dict[str, float] = across("same", default_factory=dict)
    unit: int = across("same", least=0, default=0)
    frozen: str = across("same", default="")
    module: FlatModule = workspace(default=None)
    scaler: Any = workspace(default=None)
    gradients: Gradients = workspace(default=None)

    def wait(self) -> None:
        """Bring everything up to date."""
        tensors = dict(buffers_of(self.module.module))
        self.buffers = {n: as_array(_storable(b)) for n, b in tensors.items() if _averaged(b)}
        self.counters = {n: as_array(b) for n, b in tensors.items() if not _averaged(b)}
        self.random = {name: as_array(state) for name, state in self._generators().items()}
        self.scale = dict(self.scaler.state_dict()) if self.scaler else {}
        self.unit = self.gradients.unit
        self.frozen = self.module.frozen_checksum()

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        self.wait()
        for kind in ("buffers", "counters", "scale"):
            own = getattr(self, kind)
            if saved[kind].keys() != own.keys():
                odd = sorted(saved[kind].keys() ^ own.keys())[0]
                where = "has" if odd in saved[kind] else "lacks"
                raise UserError(f"{where} model.{kind}.{odd}, unlike this program's model")
            for name, value in saved[kind].items():
                if np.shape(value) != np.shape(own[name]):
                    raise UserError(
                        f"has model.{kind}.{name} of {list(np.shape(value))}, but this model "
                        f"{list(np.shape(own[name]))}"
                    )
        if saved["frozen"] != self.frozen:
            raise UserError(
                "was trained with other frozen parameters (requires_grad=False) than this model's"
            )

    def restored(self) -> None:
        self.gradients.unit = self.unit
        values = {**self.buffers, **self.counters}
        for name, buffer in buffers_of(self.module.module):
            buffer.copy_(as_tensor(values[name]))
        for name, state in self.random.items():
            if state is not None:  # another number of ranks goes on from where it is
                self._set_generator(name, as_tensor(state))
        if self.scaler:
            self.scaler.load_state_dict(dict(self.scale))

    def unite(self, how: Buffers, comm: Communicator) -> None:
        """Make the buffers the same on all ranks.

        Args:
            how: "mean": of all ranks; what is no number with a point is rank 0's. "first": rank
                0's. "local": not at all.

        Raises:
            UserError: on all ranks, if they have other buffers than each other, or of other shapes.

        Collective. Cost: one message of their shapes, and one of all buffers.
        """
        if how == "local" or comm.size == 1:
            return
        comm.require_agreement(layout_of_buffers(self.module.module))  # they may have grown
        tensors = [buffer for _, buffer in buffers_of(self.module.module)]
        averaged = [b for b in tensors if how == "mean" and _averaged(b)]
        if averaged:
            own = torch.cat([b.detach().flatten().double() for b in averaged]).cpu().numpy()
            of_all = np.empty((comm.size, own.size))
            comm.allgather(own, of_all.reshape(-1), [own.size] * comm.size)
            mean = torch.from_numpy(of_all.mean(axis=0))
            for buffer, part in zip(
                averaged, mean.split([b.numel() for b in averaged]), strict=True
            ):
                buffer.copy_(part.view(buffer.shape))
        for buffer in tensors:
            if how == "first" or not _averaged(buffer):
                broadcast(buffer, comm)

    def _generators(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.module.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.module.device)
        return states

    def _set_generator(self, name: str, state: torch.Tensor) -> None:
        if name == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state.cpu(), self.module.device)


def broadcast(tensor: torch.Tensor, comm: Communicator, root: int = 0) -> None:
    """Make a tensor of any dtype and device on all ranks what it is on `root`. Collective."""
    if not tensor.numel():
        return
    flat = tensor.detach().flatten().contiguous()
    host = flat.view(torch.uint8).cpu().numpy().copy()
    comm.broadcast(host, root)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(host).view(tensor.dtype).view(tensor.shape))


def _averaged(buffer: torch.Tensor) -> bool:
    return bool(buffer.is_floating_point())


def _storable(buffer: torch.Tensor) -> torch.Tensor:
    """In a type that arrays have."""
    return buffer.float() if buffer.dtype == torch.bfloat16 else buffer
