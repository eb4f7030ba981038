"""Tensors of a PyTorch optimizer's state as parts of vectors in the parameters' layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import zeros_like
from ..module import FlatModule

Array = Any  #: a NumPy or CuPy array

TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose memory may be replaced: a subclass may keep its values elsewhere."""


@dataclass
class _Entry:
    """A tensor in the state of one parameter.

    Attributes:
        holder, key: where the optimizer keeps it.
        tensor: it.
        number: of the parameter.
        owner: which optimizer keeps it: 0, or more for those within it.
    """

    holder: dict[Any, Any]
    key: Any
    tensor: torch.Tensor
    number: int
    owner: int


class OptimizerVectors:
    """Has the tensors of an optimizer's state that are like their parameters lie in vectors.

    The tensors of one key (a momentum, say) lie one behind the other in a vector [n] of the
    parameters' layout. The tensors stay the same objects, whoever holds them; only their memory is
    another. So an optimizer that has another one within it, or keeps a tensor under two names, goes
    on as it is. A tensor stays where it is if the optimizer has another view of its memory, such as
    one flat buffer of all states, or if it is a view of a parameter.

    Args:
        optimizer: whose state it is.
        module: whose parameters the optimizer updates.
        vectors: by key; changed.

    Attributes:
        optimizers: it, and those within it.
        owners: of these, the ones with a state of their own.

    Local. Memory: while new tensors are moved, each of them once more.
    """

    def __init__(self, optimizer: Any, module: FlatModule, vectors: dict[str, Array]) -> None:
        self.vectors, self._module = vectors, module
        self.optimizers = [*optimizers_of(optimizer)]
        self.owners = [o for o in self.optimizers if isinstance(vars(o).get("state"), dict)]
        self._numbers = {p: number for number, p in enumerate(module.tensors.values())}
        self._names = [*module.tensors]
        self._by_name = {name: number for number, name in enumerate(module.tensors)}
        self._parameters = [*module.tensors.values()]
        self._states: list[tuple[Any, Any, list[int]]] = []
        self._held: list[dict[Any, Any]] = []
        self._lengths: list[int] = []
        self._watched: list[tuple[dict[Any, Any], Any, Any]] = []
        self._containers: list[Any] = []
        self._parts: dict[int, tuple[str, int]] = {}
        self._known: dict[int, tuple[torch.Tensor, int, tuple[str, str]]] = {}

    def update(self) -> None:
        """Move tensors that are new since the last call. Cost where none is: about 0.1
        microseconds a tensor."""
        if not self._unchanged():
            self.move()
        else:
            self._copy_from_gradient()

    def move(self) -> None:
        """The same, without looking first whether there are any."""
        entries = [*self._entries()]
        matching = [entry for entry in entries if self._matches_parameter(entry)]
        known = {*self.vectors, *(_name(entry.key) for entry in matching if entry.tensor.dim())}
        matching = [entry for entry in matching if entry.tensor.dim() or _name(entry.key) in known]
        self._parts, moving = {}, list[_Entry]()
        for entry in matching:
            for name in self._names_of(entry):
                view = self._view(name, entry.number)
                if view is not None and _same_place(entry.tensor, view):
                    self._parts[view.data_ptr()] = name, entry.number
                    break
            else:
                moving.append(entry)
        ours = {id(entry) for entry in matching}
        others = [entry for entry in entries if id(entry) not in ours]
        self._copy_overlapping(moving, others)
        if moving:
            self._move(moving, self._memory_with_other_views(moving, others))
        self._watch(matching)
        self._copy_from_gradient()

    def part_of(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """The vector and the parameter whose part of it a tensor is; None where it is none."""
        place = tensor.data_ptr()
        known = self._known.get(id(tensor))
        if known and known[0] is tensor and known[1] == place:
            return known[2]
        part = self._parts.get(place) if tensor.numel() else None
        if part is None:
            return None
        view = self._view(*part)
        same = view is not None and _same_place(tensor, view) and tensor.shape == view.shape
        return (part[0], self._names[part[1]]) if same else None

    def part(self, vector: str, parameter: str) -> torch.Tensor:
        """A new tensor, which is a parameter's part of a vector."""
        view = self._view(vector, self._by_name[parameter])
        assert view is not None
        return view.detach()

    def require(self, names: Iterable[str]) -> None:
        """Have these vectors, too: zeros where there are none yet."""
        for name in names:
            if name not in self.vectors:
                self.vectors[name] = zeros_like(self._module.parameters.flat)

    def _unchanged(self) -> bool:
        for owner, state, held in self._states:
            if owner.state is not state or [*map(id, state.values())] != held:
                return False
        return [*map(len, self._held)] == self._lengths and all(
            of_p.get(key) is value for of_p, key, value in self._watched
        )

    def _watch(self, matching: list[_Entry]) -> None:
        """What says, in the next `update`, that nothing is new."""
        self._states = [(o, o.state, [*map(id, o.state.values())]) for o in self.owners]
        self._held = [
            of_p
            for _, state, _ in self._states
            for of_p in state.values()
            if isinstance(of_p, dict)
        ]
        self._lengths = [*map(len, self._held)]
        self._watched = [(entry.holder, entry.key, entry.tensor) for entry in matching]
        self._known = {}
        for entry in matching:
            if part := self.part_of(entry.tensor):
                self._known[id(entry.tensor)] = entry.tensor, entry.tensor.data_ptr(), part
        self._watched += [
            (of_p, key, None) for of_p in self._held for key, v in of_p.items() if v is None
        ]
        values = [value for of_p in self._held for value in of_p.values()]
        self._containers = [v for v in values if isinstance(v, dict | list | deque)]

    def _entries(self) -> Iterator[_Entry]:
        """All tensors in states of the module's parameters."""
        for number, owner in enumerate(self.owners):
            for p, of_p in owner.state.items():
                if not isinstance(of_p, dict) or p not in self._numbers:
                    continue
                for key, value in of_p.items():
                    if type(value) in TENSORS and _has_storage(value):
                        yield _Entry(of_p, key, value, self._numbers[p], number)

    def _matches_parameter(self, entry: _Entry) -> bool:
        """Whether a tensor has a value for each of the parameter's. (If the parameter is of no
        dimension, so may a step counter be: `move` goes by other parameters' states.)"""
        tensor, p = entry.tensor, self._parameters[entry.number]
        kinds = [(t.shape, t.dtype, t.device) for t in (tensor, p)]
        return kinds[0] == kinds[1] and tensor.numel() > 0

    def _copy_overlapping(self, moving: list[_Entry], others: list[_Entry]) -> None:
        """Copy what would be overwritten: what lies in the gradient, which the next backward
        changes, or in a part of a vector that another tensor has now, as where an optimizer gives
        two of its tensors each other's names."""
        copies: dict[int, torch.Tensor] = {}
        gradient = self._gradient()
        for entry in (*moving, *others):
            tensor = entry.tensor
            if _lies_in(tensor, gradient) or tensor.is_inference():
                copy = copies.setdefault(id(tensor), tensor.detach().clone())
                entry.holder[entry.key] = entry.tensor = copy
        for entry in moving:
            tensor = entry.tensor
            if tensor.data_ptr() not in self._parts and _lies_in(tensor, self.vectors.values()):
                tensor.data = tensor.detach().clone()

    def _copy_from_gradient(self) -> None:
        """Copy what lies in the gradient of what states have in lists and the like."""
        waiting, gradient = [*self._containers], self._gradient()
        while waiting:
            held = waiting.pop()
            for key, value in [*(held.items() if isinstance(held, dict) else enumerate(held))]:
                if isinstance(value, torch.Tensor):
                    if _has_storage(value) and _lies_in(value, gradient):
                        held[key] = value.detach().clone()
                elif isinstance(value, dict | list | deque):
                    waiting.append(value)

    def _gradient(self) -> list[Array]:
        return [] if self._module.gradient is None else [self._module.gradient.flat]

    def _memory_with_other_views(self, moving: list[_Entry], others: list[_Entry]) -> set[int]:
        """Memory of which the optimizers have other views than the tensors to be moved."""
        objects = {id(entry.tensor) for entry in moving}
        seen = {_memory_of(entry.tensor) for entry in others}
        for owner in self.owners:
            attributes = {k: v for k, v in vars(owner).items() if k not in ("state", "defaults")}
            groups = attributes.pop("param_groups", ())
            held = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            found = _tensors_in([attributes, held], 4)
            seen |= {_memory_of(tensor) for tensor in found if id(tensor) not in objects}
        return seen

    def _move(self, moving: list[_Entry], other_views: set[int]) -> None:
        moved: dict[int, torch.Tensor] = {}
        taken = {*self._parts.values()}
        for entry in moving:
            tensor, place = entry.tensor, entry.tensor.data_ptr()
            if place in self._parts:  # under another name, too
                continue
            if place in moved:  # likewise, as another object
                tensor.data = moved[place]
                continue
            of_parameter = _lies_in(tensor, [self._module.parameters.flat])
            if of_parameter or _memory_of(tensor) in other_views:
                continue
            name = next((n for n in self._names_of(entry) if (n, entry.number) not in taken), None)
            if name is None:
                continue
            self.require([name])
            view = self._view(name, entry.number)
            assert view is not None
            view.copy_(tensor.detach())
            tensor.data = moved[place] = view.detach()
            self._parts[view.data_ptr()] = name, entry.number
            taken.add((name, entry.number))

    def _names_of(self, entry: _Entry) -> tuple[str, str]:
        """The vector of a tensor, and the one where another optimizer has a tensor of that key and
        parameter."""
        name = _name(entry.key)
        return name, f"{name} of {type(self.owners[entry.owner]).__name__}"

    def _view(self, name: str, number: int) -> torch.Tensor | None:
        if name not in self.vectors:
            return None
        return self._module.views_of(self.vectors[name])[number]


def optimizers_of(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those that it has as attributes or in lists or dictionaries of its
    attributes, as Lookahead has the one that it wraps. Local."""
    waiting, known = [optimizer], set[int]()
    while waiting:
        one = waiting.pop(0)
        if id(one) in known:
            continue
        known.add(id(one))
        yield one
        for value in vars(one).values():
            several = value.values() if isinstance(value, dict) else value
            parts = [*several] if isinstance(value, dict | list | tuple) else [value]
            waiting += [part for part in parts if isinstance(part, torch.optim.Optimizer)]


def _name(key: Any) -> str:
    """What the vector of a key is called."""
    return key if type(key) is str and key and not key.endswith("'") else f"[{key!r}]"


def _same_place(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return bool(tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride())


def _lies_in(tensor: torch.Tensor, vectors: Iterable[Array]) -> bool:
    """Whether a tensor's memory is a part of one of the vectors'."""
    place = tensor.data_ptr()
    for vector in vectors:
        begin = vector.ctypes.data if hasattr(vector, "ctypes") else vector.data.ptr
        if begin <= place < begin + vector.nbytes:
            return True
    return False


def _has_storage(tensor: torch.Tensor) -> bool:
    return bool(tensor.layout == torch.strided and not tensor.is_meta)


def _memory_of(tensor: torch.Tensor) -> int:
    """The address of all the memory that a tensor is a view of."""
    return int(tensor.untyped_storage().data_ptr())


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Tensors with memory in containers of containers."""
    if isinstance(value, torch.Tensor):
        if _has_storage(value):
            yield value
    elif depth and isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, depth - 1)
