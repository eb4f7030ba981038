"""Tags for the tensors and the program's values in a document, and walks through nested values."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from ...plain_values import DEEPEST, add_type
from ...validation import shown

Path = tuple[Any, ...]  #: keys from the whole value to a part

_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "complex128", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)
}
"""dtypes of tensors in a checkpoint, by name."""

AVERAGED = ("float64", "float32", "float16")
"""dtypes of tensors to be averaged when the number of ranks changes."""


@dataclass(frozen=True)
class PartOfVector:
    """A tag for a tensor: a parameter's part of a vector."""

    vector: str
    parameter: str


@dataclass(frozen=True)
class ValuesOf:
    """A tag for a tensor outside the vectors: its array's name, and its geometry.

    Attributes:
        name: of the array, with the tensor's values or its bytes.
        dtype, shape: of the tensor.
        axes: the tensor's axes in the order of memory: the rounding of matrix products depends on
            the order.
        on_cpu: whether the tensor was on the CPU, possibly with a model on a GPU.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    on_cpu: bool

    def __post_init__(self) -> None:
        if not all(type(length) is int and 0 <= length < 2**48 for length in self.shape):
            raise ValueError(f"{shown(self.shape)} is not the shape of a tensor")
        in_order = {*range(len(self.shape))}
        if len(self.axes) != len(self.shape) or not in_order.issuperset(self.axes):
            raise ValueError(f"{shown(self.axes)} are not the axes of a tensor")
        if len(set(self.axes)) != len(self.axes) or any(type(axis) is bool for axis in self.axes):
            raise ValueError(f"{shown(self.axes)} are not the axes of a tensor")


@dataclass(frozen=True)
class ParameterItself:
    """A tag for a parameter."""

    name: str


@dataclass(frozen=True)
class ProgramValue:
    """A tag for a value set by the program in a parameter group, such as a function: its comparable
    text.
    """

    text: str


@dataclass(frozen=True)
class WithDefault:
    """A tag for a defaultdict: the name of its default factory, and its entries."""

    factory: str | None
    entries: dict[Any, Any] = field(hash=False)


def _add_tag(kind: Any, tag: str, *types: Any) -> None:
    def from_parts(parts: Any) -> Any:
        if len(parts) != len(types) or not all(map(isinstance, parts, types)):
            raise ValueError(f"{shown(parts)} are not the parts of a {kind.__name__}")
        return kind(*parts)

    add_type(kind, tag, lambda value: [getattr(value, f.name) for f in fields(kind)], from_parts)


_add_tag(PartOfVector, "optimizer.vector", str, str)
_add_tag(ValuesOf, "optimizer.values", str, str, tuple, tuple, bool)
_add_tag(ParameterItself, "optimizer.parameter", str)
_add_tag(ProgramValue, "optimizer.own", str)
_add_tag(WithDefault, "optimizer.defaultdict", str | None, dict)

ATOMIC = frozenset({int, float, bool, str, type(None)})
"""Immutable types without parts."""


def mapped(value: Any, leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Return a copy of nested containers, with each leaf replaced.

    Args:
        value: nested dictionaries, lists and tuples, and leaves.
        leaf: maps a leaf and its path to the new leaf; also called with each defaultdict, after its
            entries.
    """

    def inner(key: Any, part: Any) -> Any:
        return mapped(part, leaf, (*path, key))

    kind: Any = type(value)
    if len(path) > DEEPEST:
        return value
    if kind in (dict, OrderedDict, defaultdict):
        pairs = {_mapped_key(k, leaf, path): inner(k, part) for k, part in value.items()}
        if kind is defaultdict:
            return leaf(defaultdict(value.default_factory, pairs), path)
        return kind(pairs)
    if kind in (list, tuple):
        return kind(inner(i, part) for i, part in enumerate(value))
    if kind is deque:
        return deque((inner(i, part) for i, part in enumerate(value)), value.maxlen)
    return leaf(value, path)


def _mapped_key(key: Any, leaf: Callable[[Any, Path], Any], path: Path) -> Any:
    return leaf(key, path) if isinstance(key, torch.Tensor | ParameterItself) else key
