"""What an optimizer's ``state_dict()`` has, as a checkpoint holds it: documents and arrays.

A document is the JSON of `plain_values`, in which a tensor is a tag: where its values are. What has
a value for each of a parameter's is a part of a vector (`OptimizerVectors`), and stays there; other
tensors become arrays. A checkpoint's documents are not believed: all names are looked up in what
this program has, dtypes in a table.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from ...errors import UserError
from ...plain_values import DEEPEST, FACTORIES, add_type, from_json, to_json
from ...training.checkpoint.schema import parsed
from ...validation import shown
from ..arrays import as_array, as_tensor
from .comparable import comparable

Array = Any  #: a NumPy or CuPy array
Path = tuple[Any, ...]  #: of keys, from the whole to a part

_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "complex128", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)
}
"""dtypes of tensors in a checkpoint."""

AVERAGED = ("float64", "float32", "float16")
"""Of these another number of ranks takes the mean."""


@dataclass(frozen=True)
class PartOfVector:
    """In place of a tensor: a parameter's part of a vector."""

    vector: str
    parameter: str


@dataclass(frozen=True)
class ValuesOf:
    """In place of another tensor: the name of its array, and what the array does not say.

    Attributes:
        name: of the array: of its values as they are, or of their bytes.
        dtype, shape: of the tensor.
        axes: of the tensor, in the order in which they lie in memory: products of matrices round by
            it.
        on_cpu: whether it was there, perhaps beside a model on a GPU.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    on_cpu: bool

    def __post_init__(self) -> None:
        if not all(type(length) is int and 0 <= length < 2**48 for length in self.shape):
            raise ValueError(f"{shown(self.shape)} is no shape of a tensor")
        in_order = {*range(len(self.shape))}
        if len(self.axes) != len(self.shape) or not in_order.issuperset(self.axes):
            raise ValueError(f"{shown(self.axes)} are not the axes of a tensor")
        if len(set(self.axes)) != len(self.axes) or any(type(axis) is bool for axis in self.axes):
            raise ValueError(f"{shown(self.axes)} are not the axes of a tensor")


@dataclass(frozen=True)
class ParameterItself:
    """In place of a parameter."""

    name: str


@dataclass(frozen=True)
class ProgramValue:
    """In place of a value in a parameter group that the program has put there, such as a function:
    what can be compared of it."""

    text: str


@dataclass(frozen=True)
class WithDefault:
    """A defaultdict: the name of what makes its values, and its entries."""

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
"""Types of values that have no parts, and never change."""


def mapped(value: Any, leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """A copy of containers within containers, with another value in place of each leaf.

    Args:
        value: dictionaries, lists and tuples of the same, and leaves.
        leaf: is given a leaf and its path; also each defaultdict, after its entries.
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


class Writer:
    """Makes documents of values, and keeps the arrays that they name.

    Args:
        part_of: finds the vector and the parameter whose part a tensor is.
        parameters: names of the parameters.
        own: texts of values that the program has put into parameter groups, by path, of when the
            learner was made: training may change what such an object has.

    Attributes:
        values: arrays of tensors of which a mean makes sense, by name.
        contents: bytes of the other tensors.

    Local.
    """

    def __init__(
        self,
        part_of: Callable[[torch.Tensor], tuple[str, str] | None],
        parameters: Mapping[Any, str],
        own: Mapping[Path, str],
    ) -> None:
        self._part_of, self._parameters, self._own = part_of, parameters, own
        self.values: dict[str, Array] = {}
        self.contents: dict[str, Array] = {}
        self._written: dict[Any, ValuesOf] = {}
        self._sources: dict[str, torch.Tensor] = {}

    def copy(self) -> Writer:
        """Another writer, which goes on after this one."""
        other = Writer(self._part_of, self._parameters, self._own)
        for name in ("values", "contents", "_written", "_sources"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def continued(self) -> Writer:
        """The same, with the tensors' present values in the arrays."""
        other = self.copy()
        for name, tensor in self._sources.items():
            if name in other.values:
                other.values[name] = _array_of(tensor)
            else:
                other.contents[name] = _bytes_of(tensor)
        return other

    def document(self, name: str, value: Any, path: Path = ()) -> str:
        """Return a value as JSON.

        Args:
            name: what errors call the value.
            path: of the value in the whole.
        Raises:
            UserError: a part of it is of a type that no checkpoint can hold.
        """
        return json.dumps(to_json(name, mapped(value, self._leaf, path)), allow_nan=False)

    def _leaf(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tag(value, path)
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            return WithDefault(name, dict(value)) if name is None or name in FACTORIES else value
        if path in self._own:
            return ProgramValue(self._own[path])
        return value

    def _tag(self, tensor: torch.Tensor, path: Path) -> Any:
        if tensor in self._parameters:
            return ParameterItself(self._parameters[tensor])
        dtype = str(tensor.dtype).removeprefix("torch.")
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and dtype in DTYPES
        if not plain or tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
            return tensor  # which is refused by name
        if part := self._part_of(tensor):
            return PartOfVector(*part)
        geometry = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        same = geometry if tensor.numel() else id(tensor)
        if same not in self._written:
            self._written[same] = self._stored(tensor, dtype, path)
        return self._written[same]

    def _stored(self, tensor: torch.Tensor, dtype: str, path: Path) -> ValuesOf:
        name = ".".join(map(str, path)).rstrip("'") or "tensor"
        while name in self.values or name in self.contents:
            name += "+"
        self._sources[name] = tensor
        if dtype in AVERAGED and "param_groups" not in path:
            self.values[name] = _array_of(tensor)
        else:
            self.contents[name] = _bytes_of(tensor)
        return ValuesOf(
            name, dtype, tuple(tensor.shape), _axes_of(tensor), tensor.device.type == "cpu"
        )


class Reader:
    """Makes values of documents.

    Args:
        part: gives a parameter's part of a vector, by both names; a KeyError if there is none.
        values, contents: as a `Writer` has kept them.
        parameters: by name.
        present: the optimizer's present ``state_dict()``, for what is the program's own.
        own: texts of that, by path: of when the learner was made.

    Local. What is the same tensor for the writer is the same tensor again. Tensors of arrays are
    copies.
    """

    def __init__(
        self,
        part: Callable[[str, str], torch.Tensor],
        values: Mapping[str, Array],
        contents: Mapping[str, Array],
        parameters: Mapping[str, Any],
        present: Any,
        own: Mapping[Path, str],
    ) -> None:
        self._part, self._values, self._contents = part, values, contents
        self._parameters, self._present, self._own = parameters, present, own
        self._made: dict[Any, torch.Tensor] = {}

    def value(self, document: str, path: Path = ()) -> Any:
        """Return the value of a document.

        Args:
            path: of the value in the whole.
        Raises:
            UserError: the document, or what it names, is not as a `Writer` writes it.
        """
        return mapped(from_json(parsed(document.encode(errors="replace"))), self._leaf, path)

    def _leaf(self, value: Any, path: Path) -> Any:
        if isinstance(value, PartOfVector | ValuesOf):
            if value not in self._made:
                made: Any = self._of_vector if isinstance(value, PartOfVector) else self._tensor
                self._made[value] = made(value)
            return self._made[value]
        if isinstance(value, ParameterItself):
            if value.name not in self._parameters:
                raise UserError(f"names a parameter {shown(value.name)}, which there is not")
            return self._parameters[value.name]
        if isinstance(value, WithDefault):
            if value.factory is not None and value.factory not in FACTORIES:
                raise UserError(f"names {shown(value.factory)} as the default of a dictionary")
            factory = None if value.factory is None else FACTORIES[value.factory]
            return defaultdict(factory, mapped(value.entries, self._leaf, path))
        if isinstance(value, ProgramValue):
            return self._program_value(value, path)
        return value

    def _of_vector(self, part: PartOfVector) -> torch.Tensor:
        try:
            return self._part(part.vector, part.parameter)
        except KeyError:
            raise UserError(
                f"names {shown(part.vector)} of {shown(part.parameter)}, which there is not"
            ) from None

    def _tensor(self, stored: ValuesOf) -> torch.Tensor:
        as_they_are = stored.name in self._values
        array = (self._values if as_they_are else self._contents).get(stored.name)
        if array is None:
            raise UserError(f"lacks the array {shown(stored.name)}")
        shape = stored.shape
        if stored.dtype not in DTYPES:
            raise UserError(f"has a tensor of dtype {shown(stored.dtype)}, which is none of ours")
        dtype = DTYPES[stored.dtype]
        if as_they_are:
            fits = array.shape == shape and str(array.dtype) == stored.dtype
        else:
            size = math.prod(shape) * dtype.itemsize
            fits = array.shape == (size,) and array.dtype == np.uint8
            fits = fits and (dtype is not torch.bool or not (array > 1).any())
        if not fits:
            raise UserError(
                f"has the array {shown(stored.name)} of {array.dtype} {list(array.shape)} for a "
                f"tensor of {stored.dtype} {list(shape)}"
            )
        tensor = as_tensor(array).clone()
        if stored.on_cpu:
            tensor = tensor.cpu()
        tensor = tensor if as_they_are else tensor.view(dtype).view(shape)
        back = sorted(range(len(shape)), key=stored.axes.__getitem__)
        return tensor.permute(stored.axes).contiguous().permute(back)

    def _program_value(self, own: ProgramValue, path: Path) -> Any:
        value = self._present
        try:
            for key in path:
                value = value[key]
        except (LookupError, TypeError):
            value = None
        present = self._own.get(path, comparable(value))
        if present != own.text:
            where = ".".join(map(str, path))
            raise UserError(f"goes with {where}={own.text}, which this optimizer has as {present}")
        return value


def _array_of(tensor: torch.Tensor) -> Array:
    """A real tensor's values, of the same memory if it has no gaps."""
    return as_array(tensor.detach().resolve_neg().contiguous())


def _bytes_of(tensor: torch.Tensor) -> Array:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return as_array(plain.reshape(-1).view(torch.uint8))


def _axes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's axes in the order in which they lie in memory, if it fills its memory."""
    strides = tensor.stride()
    axes = tuple(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return axes if tensor.permute(axes).is_contiguous() else tuple(range(tensor.dim()))


def program_values(state_dict: Any) -> dict[Path, str]:
    """What parameter groups have that no checkpoint can hold, by path: what can be compared of it.
    A checkpoint leaves it as the program has put it there. Local."""
    own: dict[Path, str] = {}

    def leaf(value: Any, path: Path) -> Any:
        if "param_groups" in path and not isinstance(value, torch.Tensor):
            try:
                to_json("value", value)
            except UserError:
                own[path] = comparable(value)
        return value

    mapped(state_dict, leaf)
    return own
