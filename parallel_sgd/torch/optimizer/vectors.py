"""Tensors of a PyTorch optimizer's state as parts of vectors in the parameters' layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import zeros_like
from ..module import FlatModule

Array = Any  #: a NumPy or CuPy array

TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors with replaceable memory: a subclass may keep its values elsewhere."""


@dataclass
class _Entry:
    """A tensor in the state of a parameter.

    Attributes:
        holder, key: the optimizer's container of the tensor, and the key there.
        tensor: the tensor.
        number: of the parameter.
        owner: number of the optimizer with this state: 0, or more for nested optimizers.
    """

    holder: dict[Any, Any]
    key: Any
    tensor: torch.Tensor
    number: int
    owner: int


class OptimizerVectors:
    """Store an optimizer's parameter-shaped state tensors in vectors.

    The tensors of a key (a momentum, say) are concatenated in a vector [n] of the parameters'
    layout. Each tensor stays the same object, for all its holders; only its memory is replaced. So
    an optimizer with a nested optimizer, or with a tensor under two names, keeps working. A tensor
    is not moved if the optimizer has another view of its memory, such as a flat buffer of all
    states, or if the tensor is a view of a parameter.

    Optimizers of separate parameters share the vector of a key.

    Args:
        optimizers: the optimizers with the state.
        module: the module of the optimizers' parameters.
        vectors: by key; changed.

    Attributes:
        optimizers: the optimizers, and their nested optimizers.
        owners: those of them with a state of their own.

    Local. Memory: a second copy of new tensors while these are moved.
    """

    def __init__(
        self, optimizers: Iterable[Any], module: FlatModule, vectors: dict[str, Array]
    ) -> None:
        self.vectors, self._module = vectors, module
        self.optimizers = [*optimizers_of(optimizers)]
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
        """Move tensors created since the last call. Cost without new tensors: about 0.1
        microseconds per tensor.
        """
        if not self._unchanged():
            self.move()
        else:
            self._copy_from_gradient()

    def move(self) -> None:
        """Move new tensors, without a prior check for any."""
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
        matching_ids = {id(entry) for entry in matching}
        rest = [entry for entry in entries if id(entry) not in matching_ids]
        self._copy_overlapping(moving, rest)
        if moving:
            self._move(moving, self._memory_with_other_views(moving, rest))
        self._watch(matching)
        self._copy_from_gradient()

    def part_of(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """Return the vector and the parameter of a tensor within the vectors; None if outside."""
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
        """Return a parameter's part of a vector, as a new tensor object."""
        view = self._view(vector, self._by_name[parameter])
        assert view is not None
        return view.detach()

    def require(self, names: Iterable[str]) -> None:
        """Add missing vectors of these names, as zeros."""
        for name in names:
            if name not in self.vectors:
                self.vectors[name] = zeros_like(self._module.parameters.flat)

    def _unchanged(self) -> bool:
        for owner, state, held in self._states:
            if owner.state is not state or [*map(id, state.values())] != held:
                return False
        return [*map(len, self._held)] == self._lengths and all(
            p_state.get(key) is value for p_state, key, value in self._watched
        )

    def _watch(self, matching: list[_Entry]) -> None:
        """Record the objects compared by the next `update` to detect new tensors."""
        self._states = [(o, o.state, [*map(id, o.state.values())]) for o in self.owners]
        self._held = [
            p_state
            for _, state, _ in self._states
            for p_state in state.values()
            if isinstance(p_state, dict)
        ]
        self._lengths = [*map(len, self._held)]
        self._watched = [(entry.holder, entry.key, entry.tensor) for entry in matching]
        self._known = {}
        for entry in matching:
            if part := self.part_of(entry.tensor):
                self._known[id(entry.tensor)] = entry.tensor, entry.tensor.data_ptr(), part
        self._watched += [
            (p_state, key, None)
            for p_state in self._held
            for key, v in p_state.items()
            if v is None
        ]
        values = [value for p_state in self._held for value in p_state.values()]
        self._containers = [v for v in values if isinstance(v, dict | list | deque)]

    def _entries(self) -> Iterator[_Entry]:
        """Yield all tensors in states of the module's parameters."""
        for number, owner in enumerate(self.owners):
            for p, p_state in owner.state.items():
                if not isinstance(p_state, dict) or p not in self._numbers:
                    continue
                for key, value in p_state.items():
                    if type(value) in TENSORS and _has_storage(value):
                        yield _Entry(p_state, key, value, self._numbers[p], number)

    def _matches_parameter(self, entry: _Entry) -> bool:
        """Return whether a tensor has its parameter's shape, dtype and device. (For a parameter of
        dimension 0, a step counter matches, too: `move` then decides by the states of the remaining
        parameters.)
        """
        tensor, p = entry.tensor, self._parameters[entry.number]
        kinds = [(t.shape, t.dtype, t.device) for t in (tensor, p)]
        return kinds[0] == kinds[1] and tensor.numel() > 0

    def _copy_overlapping(self, moving: list[_Entry], rest: list[_Entry]) -> None:
        """Copy tensors before their memory is overwritten.

        These are tensors in the gradient, which the next backward changes, and tensors in a part of
        a vector now taken by another tensor, for example after an optimizer has exchanged the names
        of two tensors.
        """
        copies: dict[int, torch.Tensor] = {}
        gradient = self._gradient()
        for entry in (*moving, *rest):
            tensor = entry.tensor
            if _lies_in(tensor, gradient) or tensor.is_inference():
                copy = copies.setdefault(id(tensor), tensor.detach().clone())
                entry.holder[entry.key] = entry.tensor = copy
        for entry in moving:
            tensor = entry.tensor
            if tensor.data_ptr() not in self._parts and _lies_in(tensor, self.vectors.values()):
                tensor.data = tensor.detach().clone()

    def _copy_from_gradient(self) -> None:
        """Copy tensors in nested containers of states if their memory is in the gradient."""
        pending, gradient = [*self._containers], self._gradient()
        while pending:
            held = pending.pop()
            for key, value in [*(held.items() if isinstance(held, dict) else enumerate(held))]:
                if isinstance(value, torch.Tensor):
                    if _has_storage(value) and _lies_in(value, gradient):
                        held[key] = value.detach().clone()
                elif isinstance(value, dict | list | deque):
                    pending.append(value)

    def _gradient(self) -> list[Array]:
        return [] if self._module.gradient is None else [self._module.gradient.flat]

    def _memory_with_other_views(self, moving: list[_Entry], rest: list[_Entry]) -> set[int]:
        """Return the memory viewed by the optimizers through tensors besides those to be moved."""
        objects = {id(entry.tensor) for entry in moving}
        seen = {_memory_of(entry.tensor) for entry in rest}
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
            if place in self._parts:  # the same tensor under a second name
                continue
            if place in moved:  # the same memory in a second tensor
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
        """Return a tensor's vector name, and the alternative if another optimizer uses that
        name.
        """
        name = _name(entry.key)
        return name, f"{name} of {type(self.owners[entry.owner]).__name__}"

    def _view(self, name: str, number: int) -> torch.Tensor | None:
        if name not in self.vectors:
            return None
        return self._module.views_of(self.vectors[name])[number]


def optimizers_of(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield optimizers and their nested optimizers: attributes, or entries of list or dictionary
    attributes, such as Lookahead's inner optimizer. Local.
    """
    pending, known = [*optimizers], set[int]()
    while pending:
        current = pending.pop(0)
        if id(current) in known:
            continue
        known.add(id(current))
        yield current
        for value in vars(current).values():
            several = value.values() if isinstance(value, dict) else value
            parts = [*several] if isinstance(value, dict | list | tuple) else [value]
            pending += [part for part in parts if isinstance(part, torch.optim.Optimizer)]


def groups_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the dictionaries of all parameter groups of optimizers, each once. Local."""
    lists = [vars(one).get("param_groups", []) for one in optimizers]
    if len(lists) == 1:
        return [*lists[0]]
    return [*{id(group): group for groups in lists for group in groups}.values()]


def _name(key: Any) -> str:
    """Return the vector's name for a key."""
    return key if type(key) is str and key and not key.endswith("'") else f"[{key!r}]"


def _same_place(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    return bool(tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride())


def _lies_in(tensor: torch.Tensor, vectors: Iterable[Array]) -> bool:
    """Return whether a tensor's memory starts within one of the vectors."""
    place = tensor.data_ptr()
    for vector in vectors:
        begin = vector.ctypes.data if hasattr(vector, "ctypes") else vector.data.ptr
        if begin <= place < begin + vector.nbytes:
            return True
    return False


def _has_storage(tensor: torch.Tensor) -> bool:
    return bool(tensor.layout == torch.strided and not tensor.is_meta)


def _memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return int(tensor.untyped_storage().data_ptr())


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield tensors with memory in nested containers."""
    if isinstance(value, torch.Tensor):
        if _has_storage(value):
            yield value
    elif depth and isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, depth - 1)
