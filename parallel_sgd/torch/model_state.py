"""The state of a PyTorch model besides its parameters: buffers, random generators, loss scale."""

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
"""Methods of a module that a subclass overrides to extend its `state_dict`."""

LARGEST_COUNT = (1 << 31) - 1
"""The largest count of a GradScaler's steps since a change of its scale: 32 bits."""

LARGEST_INTERVAL = (1 << 63) - 1  #: in steps: 64 bits in PyTorch's kernel


@dataclass
class ModelState(Component):
    """A module's buffers, and the rest of a rank's PyTorch state.

    Attributes:
        buffers: persistent buffers of floating-point or complex numbers, by name, such as
            BatchNorm's statistics.
        counters: the remaining persistent buffers.
        others: further entries of the module's `state_dict`, by key, as JSON of `plain_values`,
            such as the result of a `get_extra_state`.
        random: the states of this rank's PyTorch generators, for the CPU and the model's GPU.
        scale: the GradScaler's `state_dict`.
        unit: of gradients and residuals: see `Gradients`.
        epoch: the clock, in samples, at the beginning of the sampler's latest epoch; -1 before the
            first.
        frozen: a checksum of the frozen parameters.
        warned: whether the warning about averaged buffers has been given.
        module, scaler, gradients: the live objects behind this state.
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
        """Update all fields from the module, the scaler and the generators.

        Raises:
            UserError: the module's `state_dict` has a value that no checkpoint can hold.
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
            if kind == "others":  # a model may add entries in its first step
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
                raise UserError(f"has another kind of value for model.others.{name}")
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
        """Check that PyTorch accepts the saved states of random generators."""
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
            if state is not None:  # dropped if the number of ranks has changed
                generator.set_state(_state_of_generator(state))
        if self.scaler:
            self.scaler.load_state_dict(dict(self.scale))

    def _restore_others(self) -> None:
        """Load extra state through the module's own `load_state_dict`."""
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
            if key is None:  # not in the model yet
                holder = max((p for p in prefixes if plain.startswith(p)), key=len, default="")
                key = prefixes.get(holder, "") + plain.removeprefix(holder)
            state[key] = _value_of(text)
        module.load_state_dict(state, strict=False)

    def synchronize_buffers(self, how: Buffers | None, comm: Communicator) -> None:
        """Make the buffers equal on all ranks.

        Args:
            how: "mean": the mean over the ranks; integers and truth values are rank 0's. "first":
                rank 0's buffers. "local": no synchronization. None: the mean, with a warning of
                buffers outside BatchNorm that differ.
            comm: the ranks.
        Raises:
            UserError: on all ranks, if names or shapes of buffers differ between ranks.

        Collective. Cost: one message of shapes, and one of all buffers.
        """
        if how == "local" or comm.size == 1:
            return
        comm.require_agreement(layout_of_buffers(self.module.module))  # shapes may have changed
        tensors = [buffer for _, buffer in buffers_of(self.module.module)]
        averaged = [b for b in tensors if how in ("mean", None) and _averaged(b)]
        if averaged:
            averaged = [_real(b) for b in averaged]
            own = torch.cat([b.flatten().double() for b in averaged]).cpu().numpy()
            all_values = np.empty((comm.size, own.size))
            comm.allgather(own, all_values.reshape(-1), [own.size] * comm.size)
            if how is None:
                self._warn_of_means(all_values, comm)
            mean = torch.from_numpy(all_values.mean(axis=0))
            for buffer, part in zip(
                averaged, mean.split([b.numel() for b in averaged]), strict=True
            ):
                buffer.copy_(part.view(buffer.shape))
        for buffer in tensors:
            if how == "first" or not _averaged(buffer):
                broadcast(buffer, comm)

    def _warn_of_means(self, all_values: Array, comm: Communicator) -> None:
        """Warn once of an averaged buffer that differs between ranks and may be no statistic.

        Args:
            all_values: [ranks, n], the values of all averaged buffers.
            comm: the ranks.
        Raises:
            UserError: on all ranks, if a filter turns the warning into an error.

        Collective.
        """
        known = (nn.modules.batchnorm._NormBase,)
        begin = 0
        for name, part, own in places_of_buffers(self.module.module):
            buffer = part._buffers[own]
            if buffer is None or not _averaged(buffer):
                continue
            end = begin + _real(buffer.detach()).numel()
            values, begin = all_values[:, begin:end], end
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
        """Return PyTorch's default generators, as used by dropout, by kind of device. Local."""
        device = self.module.device
        generators = {"cpu": torch.default_generator}
        if device.type == "cuda":
            torch.cuda.init()
            generators["cuda"] = torch.cuda.default_generators[device.index or 0]
        return generators


def broadcast(tensor: torch.Tensor, comm: Communicator, root: int = 0) -> None:
    """Copy a tensor of any dtype and device from `root` to all ranks, in place. Collective."""
    if not tensor.numel():
        return
    flat = tensor.detach().flatten().contiguous()
    host = flat.view(torch.uint8).cpu().numpy().copy()
    comm.broadcast(host, root)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(host).view(tensor.dtype).view(tensor.shape))


def _put_into(buffers: dict[str, Any], name: str, values: torch.Tensor) -> None:
    """Restore a module's buffer in place; replace the buffer if its shape has changed since."""
    real = _real(buffers[name].detach())
    if real.shape == values.shape:
        real.copy_(values)
    else:
        plain = torch.view_as_complex(values) if buffers[name].is_complex() else values
        buffers[name] = plain.to(buffers[name], copy=True)


def _averaged(buffer: torch.Tensor) -> bool:
    return bool(buffer.is_floating_point() or buffer.is_complex())


def _real(buffer: torch.Tensor) -> torch.Tensor:
    """Return a view as real numbers: real and imaginary parts of a complex buffer."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _storable(buffer: torch.Tensor) -> torch.Tensor:
    """Return the values in a dtype of arrays: float32 holds all shorter dtypes exactly."""
    real = _real(buffer)
    return real if real.dtype in FLOATS else real.float()


def _state_of_generator(state: Array) -> torch.Tensor:
    return as_tensor(state).cpu()


def _value_of(text: str) -> Any:
    """Decode a text of `ModelState.others`.

    Raises:
        UserError: the text is no document of `plain_values`.
    """
    return from_json(parsed(text.encode(errors="replace")))


def _extends_state_dict(part: nn.Module) -> bool:
    """Return whether a module's `state_dict` may have more than parameters and buffers."""
    own = (getattr(type(part), name) is not getattr(nn.Module, name) for name in STATE_DICT_METHODS)
    return any(own) or bool(part._state_dict_hooks or part._state_dict_pre_hooks)


def _extras_of(module: nn.Module) -> dict[str, Any]:
    """Return entries of a module's `state_dict` besides parameters and persistent buffers, by key:
    the results of `get_extra_state`, and additions by a subclass or hook. Local.
    """
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
