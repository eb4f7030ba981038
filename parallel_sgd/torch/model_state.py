"""What a model remembers beside its parameters: buffers, the random generator, the loss scale."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from ..communication import Communicator
from ..errors import UserError
from ..plain_values import from_json, to_json
from ..state import Component, across, workspace
from ..training.checkpoint.schema import parsed
from ..validation import shown
from ..warning import warn
from .arrays import FLOATS, as_array, as_tensor
from .gradients import Gradients
from .module import (
    FlatModule,
    buffers_of,
    layout_of_buffers,
    places_of_buffers,
    plain_name,
)

Array = Any  #: a NumPy or CuPy array

Buffers = Literal["mean", "first", "local"]
BUFFERS = get_args(Buffers)

MEAN_WARNING = (
    "buffer {name!r} differs between ranks and becomes their mean: give the learner "
    'buffers="mean" if that is meant, "first" to take rank 0\'s, or "local" to leave each rank its '
    "own"
)

STATE_DICT_METHODS = ("get_extra_state", "_save_to_state_dict", "state_dict")
"""Methods of a module by which a class of its own adds to its `state_dict`."""

LARGEST_COUNT = (1 << 31) - 1
"""Of a GradScaler's steps since its scale has changed, which it keeps in 32 bits."""

LARGEST_INTERVAL = (1 << 63) - 1  #: of steps, which PyTorch's kernel takes in 64 bits


@dataclass
class ModelState(Component):
    """A module's buffers, and what else of PyTorch's a rank goes on with.

    Attributes:
        buffers: of floating-point or complex numbers, by name: the statistics of BatchNorm, say.
        counters: the other buffers.
        others: what else the module's `state_dict` has, by its keys, as JSON of `plain_values`:
            the result of a `get_extra_state`, say.
        random: the state of PyTorch's generators of this rank, on the CPU and the model's GPU.
        scale: of a GradScaler's, by the names in its `state_dict`.
        unit: of gradients and residuals: see `Gradients`.
        epoch: samples at which the epoch begins that a sampler has given minibatches of; -1 before.
        frozen: a checksum of the parameters that are not trained.
        warned: whether a buffer was named that may not be meant to be averaged.
        module, scaler, gradients: at work.
    """

    buffers: dict[str, Array] = across("mean", default_factory=dict)
    counters: dict[str, Array] = across("same", default_factory=dict)
    others: dict[str, str] = across("same", open=True, default_factory=dict)
    random: dict[str, Array] = across("drop", default_factory=dict)
    scale: dict[str, float] = across("same", default_factory=dict)
    unit: int = across("same", least=0, default=0)
    epoch: int = across("same", least=-1, default=-1)
    frozen: str = across("same", default="")
    warned: bool = workspace(default=False)
    module: FlatModule = workspace(default=None)
    scaler: Any = workspace(default=None)
    gradients: Gradients = workspace(default=None)

    def wait(self) -> None:
        """Bring everything up to date.

        Raises:
            UserError: the module's `state_dict` has what no checkpoint can give back.
        """
        tensors = dict(buffers_of(self.module.module))
        self.buffers = {n: as_array(_storable(b)) for n, b in tensors.items() if _averaged(b)}
        self.counters = {n: as_array(b) for n, b in tensors.items() if not _averaged(b)}
        self.others = {
            name: json.dumps(to_json(f"model.state_dict()[{name!r}]", value))
            for name, value in _extras_of(self.module.module).items()
        }
        self.random = {
            name: as_array(generator.get_state()) for name, generator in self.generators().items()
        }
        self.scale = dict(self.scaler.state_dict()) if self.scaler else {}
        self.unit = self.gradients.unit
        self.frozen = self.module.frozen_checksum()

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        self.wait()
        for kind in ("buffers", "counters", "others", "scale"):
            own = getattr(self, kind)
            odd_ones = saved[kind].keys() ^ own.keys()
            if kind == "others":  # a model may have some of them only after a step
                odd_ones -= saved[kind].keys()
            if odd_ones:
                odd = min(odd_ones)
                where = "has" if odd in saved[kind] else "lacks"
                raise UserError(f"{where} model.{kind}.{odd}, unlike this program's model")
            for name, value in saved[kind].items():
                if kind != "others" and np.shape(value) != np.shape(own[name]):
                    raise UserError(
                        f"has model.{kind}.{name} of {list(np.shape(value))}, but this model "
                        f"{list(np.shape(own[name]))}"
                    )
        if saved["frozen"] != self.frozen:
            raise UserError(
                "was trained with other frozen parameters (requires_grad=False) than this model's"
            )
        for name, text in saved["others"].items():
            if not isinstance(text, str):
                raise UserError(f"has something else for model.others.{name}")
            try:
                _value_of(text)
            except UserError as error:
                raise UserError(f"has model.others.{name}, which {error}") from None
        for name, value in saved["scale"].items():
            most: float = LARGEST_INTERVAL if isinstance(value, int) else sys.float_info.max
            most = LARGEST_COUNT if name == "_growth_tracker" else most
            if not 0 <= value <= most or (name == "scale" and not value):
                raise UserError(f"has model.scale.{name}={shown(value)}, which no GradScaler has")
        self._check_generators(saved["random"])

    def _check_generators(self, states: Mapping[str, Any]) -> None:
        """See that PyTorch takes the states of random generators."""
        for name, own in self.generators().items():
            state = states.get(name)
            if state is not None:
                try:
                    torch.Generator(own.device).set_state(_state_of_generator(state))
                except (RuntimeError, TypeError) as error:
                    raise UserError(
                        f"has model.random.{name}, which is no state of PyTorch's generator: "
                        f"{shown(str(error))}"
                    ) from None

    def restored(self) -> None:
        self.gradients.unit = self.unit
        values = {**self.buffers, **self.counters}
        for name, part, own in [*places_of_buffers(self.module.module)]:
            _put_into(part._buffers, own, as_tensor(values[name]))
        self._restore_others()
        for name, generator in self.generators().items():
            state = self.random.get(name)
            if state is not None:  # another number of ranks goes on from where it is
                generator.set_state(_state_of_generator(state))
        if self.scaler:
            self.scaler.load_state_dict(dict(self.scale))

    def _restore_others(self) -> None:
        """Have the module itself put back what only its own methods know."""
        if not self.others:
            return
        module = self.module.module
        state = dict(module.state_dict())
        keys = {plain_name(key): key for key in state}
        prefixes = {
            plain_name(f"{name}."): f"{name}." for name, _ in module.named_modules() if name
        }
        for plain, text in self.others.items():
            key = keys.get(plain)
            if key is None:  # the model has none yet
                holder = max((p for p in prefixes if plain.startswith(p)), key=len, default="")
                key = prefixes.get(holder, "") + plain.removeprefix(holder)
            state[key] = _value_of(text)
        module.load_state_dict(state, strict=False)

    def synchronize_buffers(self, how: Buffers | None, comm: Communicator) -> None:
        """Make the buffers the same on all ranks.

        Args:
            how: "mean": of all ranks; integers and truth values are rank 0's. "first": rank 0's.
                "local": not at all. None: the mean, with a warning where that may not be meant.

        Raises:
            UserError: on all ranks, if they have other buffers than each other, or of other shapes.

        Collective. Cost: one message of their shapes, and one of all buffers.
        """
        if how == "local" or comm.size == 1:
            return
        comm.require_agreement(layout_of_buffers(self.module.module))  # they may have grown
        tensors = [buffer for _, buffer in buffers_of(self.module.module)]
        averaged = [b for b in tensors if how in ("mean", None) and _averaged(b)]
        if averaged:
            averaged = [_real(b) for b in averaged]
            own = torch.cat([b.flatten().double() for b in averaged]).cpu().numpy()
            of_all = np.empty((comm.size, own.size))
            comm.allgather(own, of_all.reshape(-1), [own.size] * comm.size)
            if how is None:
                self._warn_of_means(of_all, comm)
            mean = torch.from_numpy(of_all.mean(axis=0))
            for buffer, part in zip(
                averaged, mean.split([b.numel() for b in averaged]), strict=True
            ):
                buffer.copy_(part.view(buffer.shape))
        for buffer in tensors:
            if how == "first" or not _averaged(buffer):
                broadcast(buffer, comm)

    def _warn_of_means(self, of_all: Array, comm: Communicator) -> None:
        """Name a buffer that ranks have otherwise than each other, and that may be no statistic of
        all samples; once.

        Args:
            of_all: [ranks, n], the values of all that are averaged.
        Raises:
            UserError: on all ranks, where a filter makes an error of the warning.

        Collective.
        """
        known = (nn.modules.batchnorm._NormBase,)
        begin = 0
        for name, part, own in places_of_buffers(self.module.module):
            buffer = part._buffers[own]
            if buffer is None or not _averaged(buffer):
                continue
            end = begin + _real(buffer.detach()).numel()
            values, begin = of_all[:, begin:end], end
            differs = not np.array_equal(values, np.broadcast_to(values[0], values.shape), True)
            if differs and not isinstance(part, known) and not self.warned:
                self.warned = True
                problem = None
                if comm.rank == 0:
                    try:
                        warn(MEAN_WARNING.format(name=name))
                    except UserError as error:
                        problem = str(error)
                comm.raise_together(problem)

    def generators(self) -> dict[str, torch.Generator]:
        """Return PyTorch's own, which dropout draws from, by the kind of device. Local."""
        device = self.module.device
        generators = {"cpu": torch.default_generator}
        if device.type == "cuda":
            torch.cuda.init()
            generators["cuda"] = torch.cuda.default_generators[device.index or 0]
        return generators


def broadcast(tensor: torch.Tensor, comm: Communicator, root: int = 0) -> None:
    """Make a tensor of any dtype and device on all ranks what it is on `root`. Collective."""
    if not tensor.numel():
        return
    flat = tensor.detach().flatten().contiguous()
    host = flat.view(torch.uint8).cpu().numpy().copy()
    comm.broadcast(host, root)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(host).view(tensor.dtype).view(tensor.shape))


def _put_into(buffers: dict[str, Any], name: str, values: torch.Tensor) -> None:
    """Make a module's buffer what it was, in place; anew, where it has grown since."""
    real = _real(buffers[name].detach())
    if real.shape == values.shape:
        real.copy_(values)
    else:
        plain = torch.view_as_complex(values) if buffers[name].is_complex() else values
        buffers[name] = plain.to(buffers[name], copy=True)


def _averaged(buffer: torch.Tensor) -> bool:
    return bool(buffer.is_floating_point() or buffer.is_complex())


def _real(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers: of a complex one real and imaginary parts."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _storable(buffer: torch.Tensor) -> torch.Tensor:
    """The values in a dtype that arrays have: float32 holds all of the shorter ones."""
    real = _real(buffer)
    return real if real.dtype in FLOATS else real.float()


def _state_of_generator(state: Array) -> torch.Tensor:
    return as_tensor(state).cpu()


def _value_of(text: str) -> Any:
    """What a text in `ModelState.others` says.

    Raises:
        UserError: it is no document of `plain_values`.
    """
    return from_json(parsed(text.encode(errors="replace")))


def _extends_state_dict(part: nn.Module) -> bool:
    """Whether a module's `state_dict` may have more than its parameters and buffers."""
    own = (getattr(type(part), name) is not getattr(nn.Module, name) for name in STATE_DICT_METHODS)
    return any(own) or bool(part._state_dict_hooks or part._state_dict_pre_hooks)


def _extras_of(module: nn.Module) -> dict[str, Any]:
    """What a module's `state_dict` has that is neither parameter nor persistent buffer, by its
    keys: `get_extra_state`, or what a class or a hook of its own adds. Local."""
    if not any(map(_extends_state_dict, module.modules())):
        return {}
    known = dict(module.named_parameters(remove_duplicate=False))
    known.update(buffers_of(module))
    names, places = {plain_name(name) for name in known}, {t.data_ptr() for t in known.values()}
    return {
        plain_name(key): value
        for key, value in module.state_dict().items()
        if plain_name(key) not in names
        and not (isinstance(value, torch.Tensor) and value.data_ptr() in places - {0})
    }
