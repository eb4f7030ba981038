"""State trees: a learner's checkpointed state as plain values, captured and restored.

A state tree consists of dictionaries by field name, with arrays, numbers, texts and None as leaves.
Fields marked by `parallel_sgd.state.workspace` are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UserError
from ...kernels import array_module, empty_like, memory
from ...state import External, components_of, wait_for
from .stateful import Stateful

Array = Any  #: a NumPy or CuPy array
HostArray = npt.NDArray[Any]
Tree = dict[str, Any]

PLAIN = (bool, int, float, str, type(None))


def capture(learner: Stateful) -> Tree:
    """Return the learner's state as a tree. Its arrays are the learner's own, not copies.

    Waits for background work; training is not affected. Collective if servers hold a part of the
    state; otherwise local.

    Raises:
        UserError: a state holds a value of a type not allowed by `parallel_sgd.state`.
    """
    for component in components_of(learner.states):
        component.collect() if isinstance(component, External) else component.wait()
    return {"parameters": learner.parameters.flat} | {
        name: _capture(state, name) for name, state in learner.states.items()
    }


def room_for(learner: Stateful, saved: Tree) -> Tree:
    """Return the arrays to receive a tree's values: the learner's own arrays if shape and dtype are
    equal, so that views stay valid; otherwise new arrays. Local.

    Raises:
        MemoryError: not enough memory for new arrays; nothing has changed.
    """
    wait_for(learner.states)
    x = learner.parameters.flat
    return {name: _room(live, saved[name], x) for name, live in _live(learner).items()}


def restore(learner: Stateful, saved: Tree, room: Tree | None = None) -> None:
    """Restore a learner's state from a tree of NumPy arrays.

    Args:
        room: returned by `room_for` before, or None.

    The tree must have passed `checkpoint.compatibility`, so nothing can fail midway. Collective if
    servers hold a part of the state; otherwise local.
    """
    room = room or room_for(learner, saved)
    for name, live in _live(learner).items():
        _restored(live, saved[name], room[name])
    for component in components_of(learner.states):
        component.restored()


def restore_state(learner: Stateful, name: str, saved: Tree) -> None:
    """Restore one of a learner's states, a component as a whole. Local."""
    live = learner.states[name]
    wait_for(learner.states)
    _restored(live, saved, _room(live, saved, learner.parameters.flat))
    live.restored()


def _live(learner: Stateful) -> dict[str, Any]:
    return {"parameters": learner.parameters.flat, **learner.states}


def flatten(tree: Tree) -> tuple[Tree, dict[str, Array]]:
    """Return a tree with ``[name]`` in place of every array, in a form that JSON can hold, and the
    arrays by name."""
    arrays: dict[str, Array] = {}

    def flat(value: Any, where: str) -> Any:
        if isinstance(value, dict):
            return {name: flat(entry, f"{where}.{name}") for name, entry in value.items()}
        if isinstance(value, PLAIN):
            return value
        name = where[1:]
        while name in arrays:  # only if names in dictionaries have dots
            name += "'"
        arrays[name] = value
        return [name]

    return flat(tree, ""), arrays


def unflatten(tree: Any, arrays: Mapping[str, HostArray]) -> Any:
    """Return the tree for the output of `flatten`: its inverse."""
    if isinstance(tree, dict):
        return {name: unflatten(subtree, arrays) for name, subtree in tree.items()}
    return arrays[tree[0]] if isinstance(tree, list) else tree


class HostCopies:
    """Copies of arrays in host memory; later copies reuse the memory of equal shapes."""

    def __init__(self) -> None:
        self._copies: dict[str, HostArray] = {}

    def of(self, arrays: Mapping[str, Array]) -> dict[str, HostArray]:
        """Return copies, valid until the next call. Local. Cost: one pass over memory."""
        copies = {}
        for name, array in arrays.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != array.shape or copy.dtype != array.dtype:
                copy = memory.empty(array.size, array.dtype).reshape(array.shape)
            if array_module(array) is np:
                copy[...] = array
            else:
                array.get(out=copy)
            copies[name] = copy
        self._copies = copies
        return copies


def state_fields(state: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass to be checkpointed."""
    return [field for field in fields(state) if not field.metadata.get("workspace")]


def is_state(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or array_module(value) is not np


def _capture(value: Any, where: str) -> Any:
    if is_state(value):
        return {
            field.name: _capture(getattr(value, field.name), f"{where}.{field.name}")
            for field in state_fields(value)
        }
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise UserError(f"{where}: keys in a checkpoint must be texts")
        return {name: _capture(entry, f"{where}.{name}") for name, entry in value.items()}
    if isinstance(value, PLAIN) or (is_array(value) and value.dtype != object):
        return value
    raise UserError(
        f"{where} is a {type(value).__name__}, but training state must be made of arrays, numbers, "
        "dictionaries and dataclasses of them: see parallel_sgd.state"
    )


def _room(old: Any, saved: Any, like: Array) -> Any:
    """Return the arrays to receive a saved tree: the state's own, or new ones."""
    if isinstance(saved, dict):
        return {name: _room(_entry(old, name), entry, like) for name, entry in saved.items()}
    if not isinstance(saved, np.ndarray):
        return None
    if is_array(old) and old.shape == saved.shape and old.dtype == saved.dtype:
        return old
    return empty_like(like, saved.size, saved.dtype).reshape(saved.shape)


def _entry(old: Any, name: str) -> Any:
    if isinstance(old, dict):
        return old.get(name)
    return getattr(old, name) if is_state(old) else None


def _restored(old: Any, saved: Any, room: Any) -> Any:
    """Return the value to replace `old`: `old` itself, changed in place, if possible."""
    if is_state(old) and saved is not None:
        for field in state_fields(old):
            name = field.name
            setattr(old, name, _restored(getattr(old, name), saved[name], room[name]))
        return old
    if isinstance(saved, dict):
        old = old if isinstance(old, dict) else {}
        values = {name: _restored(old.get(name), saved[name], room[name]) for name in saved}
        old.clear()
        old.update(values)
        return old
    if not isinstance(saved, np.ndarray):
        return saved
    if array_module(room) is np:
        room[...] = saved
    else:
        room.set(np.asarray(saved, order="C"))  # also for arrays without axes
    return room
