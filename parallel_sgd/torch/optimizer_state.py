"""What a PyTorch optimizer remembers, as vectors and numbers that every checkpoint can hold."""

from __future__ import annotations

import copy
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..kernels import zeros_like
from ..optimizers import OptimizerState
from ..state import across, workspace
from .arrays import as_array, as_tensor, checksum_of
from .module import FlatModule

Array = Any  #: a NumPy or CuPy array

SCHEDULED = ("initial_lr", "base_momentum", "max_momentum", "max_lr", "min_lr")
"""Among a group's hyperparameters: what PyTorch's schedulers put there."""

UPDATED = "updated"
"""Among the scalars: 1 for a parameter that has been updated, and so has a state."""


@dataclass
class TorchOptimizerState(OptimizerState):
    """The state of a PyTorch optimizer, in its parameters' layout.

    Its tensors of a parameter's shape lie one behind the other in vectors [n], of which PyTorch's
    own state holds views: a momentum can be averaged, or written, like every other vector.

    Attributes:
        scalars: by key ("step"), of each parameter the number in its state; NaN where it has none.
        kinds: of these numbers, by key: "int", "float", or a tensor's dtype.
        others: tensors of other shapes, as "key of parameter".
        groups: the groups' hyperparameters, with what schedulers have made of them, as JSON.
        optimizer, module: at work.
        initial: what the optimizer's state was at first, of those that begin with one (Adagrad).
        states, places: how many parameters have a state, and which of its tensors are where.

    Made by `of`. Memory: what the optimizer has anyway; while its first step is adopted, once more.
    """

    scalars: dict[str, Array] = across("mean", default_factory=dict)
    kinds: dict[str, str] = across("same", default_factory=dict)
    others: dict[str, Array] = across("mean", default_factory=dict)
    groups: str = across("same", default="[]")
    optimizer: Any = workspace(default=None)
    module: FlatModule = workspace(default=None)
    initial: Any = workspace(default=None)
    states: int = workspace(default=0)
    places: list[tuple[dict[str, Any], str, int]] = workspace(default_factory=list)

    @classmethod
    def of(cls, optimizer: Any, module: FlatModule) -> TorchOptimizerState:
        """The state as it is, which may be that of earlier training. Local."""
        initial = copy.deepcopy(
            {p: dict(of_p) for p, of_p in optimizer.state.items()},
            {id(p): p for p in optimizer.state},
        )
        state = cls(optimizer=optimizer, module=module, initial=initial)
        for key in _vector_keys(optimizer, module):
            state._views(key)
        state.adopt()
        return state

    def adopt(self) -> None:
        """Put tensors of the state into the vectors, where a step has made new ones. Local."""
        known = self.optimizer.state
        if len(known) == self.states and all(
            of_p[key].data_ptr() == address for of_p, key, address in self.places
        ):
            return
        self.states, self.places = len(known), []
        for number, p in enumerate(self.module.tensors.values()):
            of_p = known.get(p, {})
            for key, value in of_p.items():
                if _fills(value, p):
                    view = self._views(key)[number]
                    if value.data_ptr() != view.data_ptr():
                        of_p[key] = view.copy_(value)
                    self.places.append((of_p, key, view.data_ptr()))

    def forget(self) -> None:
        """As before the first step, but for the clock. Local."""
        self.steps = 0
        self.optimizer.state.clear()
        self.states = -1
        for vector in self.buffers.values():
            vector.fill(0)
        for p, of_p in self.initial.items():
            self.optimizer.state[p] = copy.deepcopy(of_p)
        self.adopt()

    def wait(self) -> None:
        """Bring what is no vector up to date with PyTorch's own."""
        self.adopt()
        names, known = self.module.tensors, self.optimizer.state
        self.scalars, self.others = {}, {}
        for number, (name, p) in enumerate(names.items()):
            of_p = {key: v for key, v in known.get(p, {}).items() if not _fills(v, p)}
            if known.get(p):
                of_p[UPDATED] = 1
            for key, value in of_p.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    self.others[f"{key} of {name}"] = as_array(value)
                elif isinstance(value, torch.Tensor | int | float):
                    self.kinds[key] = str(getattr(value, "dtype", type(value).__name__))
                    vector = self.scalars.setdefault(key, np.full(len(names), np.nan))
                    vector[number] = float(value)
                elif value is not None:
                    raise UserError(
                        f"the state of {type(self.optimizer).__name__} has {key!r}, a "
                        f"{type(value).__name__}, which no checkpoint can hold"
                    )
        self.groups = json.dumps(dict(_hyperparameters(self.optimizer)))

    def copied(self, room: Mapping[str, Any]) -> dict[str, Any]:
        self.wait()
        others = {key: array.copy() for key, array in self.others.items()}
        return super().copied(room) | {"scalars": self.scalars, "others": others}

    def put_back(self, copied: Mapping[str, Any]) -> None:
        self.wait()  # rates stay as schedulers have made them
        super().put_back(copied)
        self.scalars, self.others = copied["scalars"], copied["others"]
        self.restored()

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        if self.buffers:
            super().check(saved, ranks)
        names = self.module.tensors
        for key, vector in saved["scalars"].items():
            if vector.shape != (len(names),):
                raise UserError(f"has optimizer.scalars.{key} of {vector.shape}, not {len(names)}")
        for key in saved["others"]:
            if key.partition(" of ")[2] not in names:
                raise UserError(f"has optimizer.others.{key}, which is of no parameter")
        own = dict(_hyperparameters(self.optimizer))
        try:
            theirs = json.loads(saved["groups"]).keys()
        except (ValueError, AttributeError):
            raise UserError("has optimizer.groups that cannot be read") from None
        if theirs != own.keys():
            odd = sorted(theirs ^ own.keys())[0]
            raise UserError(
                f"has other hyperparameters than this optimizer: {odd}"
                + " (schedulers add it: make them before load_checkpoint)" * odd.endswith(SCHEDULED)
            )

    def restored(self) -> None:
        """Put what a checkpoint has brought into PyTorch's own state."""
        values = json.loads(self.groups)
        groups = [
            {name: _put_back(f"{i}.{name}", value, values) for name, value in group.items()}
            for i, group in enumerate(self.optimizer.param_groups)
        ]
        packed = self.optimizer.state_dict()
        numbers = {
            p: number
            for group, numbered in zip(groups, packed["param_groups"], strict=True)
            for p, number in zip(group["params"], numbered["params"], strict=True)
        }
        for group, numbered in zip(groups, packed["param_groups"], strict=True):
            group["params"] = numbered["params"]
        updated, state = self.scalars.get(UPDATED), dict[int, Any]()
        for number, (name, p) in enumerate(self.module.tensors.items()):
            if updated is not None and not np.isnan(updated[number]):
                state[numbers[p]] = self._of_parameter(number, name)
            elif p in self.initial:
                state[numbers[p]] = copy.deepcopy(self.initial[p])
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.states = -1
        self.adopt()

    def _of_parameter(self, number: int, name: str) -> dict[str, Any]:
        of_p: dict[str, Any] = {key: self._views(key)[number] for key in self.buffers}
        for key, vector in self.scalars.items():
            if key != UPDATED and not np.isnan(vector[number]):
                value, kind = float(vector[number]), self.kinds[key]
                if kind in ("int", "float"):
                    of_p[key] = int(value) if kind == "int" else value
                else:
                    of_p[key] = torch.tensor(value, dtype=getattr(torch, kind.partition(".")[2]))
        for key, array in self.others.items():
            kind, _, parameter = key.partition(" of ")
            if parameter == name:
                of_p[kind] = as_tensor(array).clone()
        return of_p

    def _views(self, key: str) -> list[torch.Tensor]:
        """A vector's parts as tensors; zeros, where there is none yet."""
        if key not in self.buffers:
            x = self.module.parameters.flat
            self.buffers[key] = zeros_like(x)
        return self.module.views_of(self.buffers[key])


def _fills(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a part of a state has a value for each of the parameter's."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == parameter.shape
        and value.dtype == parameter.dtype
        and value.dim() > 0
    )


def _vector_keys(optimizer: Any, module: FlatModule) -> list[str]:
    """Which vectors the optimizer will have, in order: all ranks must have them alike, also one
    that has not taken a step yet. A copy takes one, on a stand-in for each group's parameters.

    Raises:
        UserError: it cannot.
    """
    stand_in = copy.copy(optimizer)  # without hooks, and without what subclasses have added
    for name, value in vars(optimizer).items():
        if name != "step":  # a scheduler's, which calls this optimizer's
            vars(stand_in).setdefault(name, copy.copy(value))
    stand_in.state, like = defaultdict(dict), next(iter(module.tensors.values()))
    stand_in.param_groups = []
    for group in optimizer.param_groups:
        p = torch.nn.Parameter(torch.zeros(2, 3, dtype=like.dtype, device=like.device))
        p.grad = torch.zeros_like(p)
        some: dict[str, Any] = next(
            (optimizer.state[q] for q in group["params"] if optimizer.state.get(q)), {}
        )
        for key, value in some.items():
            fills = isinstance(value, torch.Tensor) and value.dim() > 0
            stand_in.state[p][key] = torch.zeros_like(p) if fills else copy.deepcopy(value)
        stand_in.param_groups.append({**group, "params": [p]})
    try:
        stand_in.step()
    except Exception as error:
        raise UserError(
            f"optimizer {type(optimizer).__name__} fails in a step of a copy, on a parameter of "
            f"its own for each group: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return sorted(
        {key for p, of_p in stand_in.state.items() for key, v in of_p.items() if _fills(v, p)}
    )


def remembered(optimizer: Any, module: FlatModule) -> dict[str, str]:
    """What an optimizer of PyTorch's has kept of earlier training, for the ranks to compare; one of
    ours begins anew. Local."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {}
    known, checksum = 0, 0
    for p in module.tensors.values():
        of_p = optimizer.state.get(p) or {}
        known += bool(of_p)
        for key, value in of_p.items():
            if isinstance(value, torch.Tensor):
                checksum = checksum_of(value, checksum)
            else:
                checksum = zlib.crc32(f"{key} {value!r}".encode(), checksum)
    kept = f"of {known} parameters, with checksum {checksum:08x}" if known else "none"
    return {"state of the optimizer": kept}


def _hyperparameters(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Those of every group, by names such as "0.lr" and "0.betas.1"."""
    for i, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            several = isinstance(value, tuple | list)
            for j, item in enumerate(value if several else [value]):
                full = f"{i}.{name}.{j}" if several else f"{i}.{name}"
                if isinstance(item, torch.Tensor) and item.numel() == 1 and name != "params":
                    yield full, item.item()
                elif isinstance(item, bool | int | float | str | None) and name != "param_names":
                    yield full, item


def _put_back(name: str, value: Any, saved: Mapping[str, Any]) -> Any:
    """A hyperparameter, as it was saved; what cannot be saved as it is."""
    if isinstance(value, tuple | list):
        return type(value)(_put_back(f"{name}.{j}", v, saved) for j, v in enumerate(value))
    if name not in saved:
        return value
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, saved[name])
    return saved[name]
