"""Optimizer state in checkpoints: a ``state_dict()`` as documents and arrays.

A document is JSON of `plain_values`, with a tag for each tensor: the place of its values. A tensor
with a value for each value of a parameter is part of a vector (`OptimizerVectors`), and stays
there; the remaining tensors become arrays. Documents from a checkpoint are not trusted: names are
looked up in this program's objects, and dtypes in a table.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ...errors import UserError
from ...plain_values import FACTORIES, from_json, to_json
from ...training.checkpoint.schema import parsed
from ...validation import shown
from ..arrays import as_array, as_tensor
from .comparable import comparable
from .tags import (
    AVERAGED,
    DTYPES,
    ParameterItself,
    PartOfVector,
    Path,
    ProgramValue,
    ValuesOf,
    WithDefault,
    mapped,
)

Array = Any  #: a NumPy or CuPy array


class Writer:
    """Encode values as documents, and collect the arrays named in the documents.

    Args:
        part_of: maps a tensor to its vector and parameter; None for a tensor outside the vectors.
        parameters: names of the parameters.

    Attributes:
        values: arrays of tensors to be averaged, by name.
        contents: bytes of the remaining tensors, by name.

    Local.
    """

    def __init__(
        self,
        part_of: Callable[[torch.Tensor], tuple[str, str] | None],
        parameters: Mapping[Any, str],
    ) -> None:
        self._part_of, self._parameters = part_of, parameters
        self.values: dict[str, Array] = {}
        self.contents: dict[str, Array] = {}
        self._written: dict[Any, ValuesOf] = {}
        self._sources: dict[str, torch.Tensor] = {}

    def copy(self) -> Writer:
        """Return a second writer in the same state."""
        other = Writer(self._part_of, self._parameters)
        for name in ("values", "contents", "_written", "_sources"):
            setattr(other, name, dict(getattr(self, name)))
        return other

    def continued(self) -> Writer:
        """Return a copy of this writer, with the tensors' present values in the arrays."""
        other = self.copy()
        for name, tensor in self._sources.items():
            if name in other.values:
                other.values[name] = _array_of(tensor)
            else:
                other.contents[name] = _bytes_of(tensor)
        return other

    def document(
        self,
        name: str,
        value: Any,
        path: Path = (),
        own: Mapping[Path, str] = MappingProxyType({}),
    ) -> str:
        """Return a value as JSON.

        Args:
            name: of the value, for errors.
            value: to be encoded.
            path: of the value in the whole.
            own: texts of the program's values in parameter groups, by path, taken when the learner
                was made, since training may change such objects.
        Raises:
            UserError: part of the value has a type that no checkpoint can hold.
        """

        def leaf(value: Any, path: Path) -> Any:
            return ProgramValue(own[path]) if path in own else self._leaf(value, path)

        return json.dumps(to_json(name, mapped(value, leaf, path)), allow_nan=False)

    def _leaf(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tag(value, path)
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            return WithDefault(name, dict(value)) if name is None or name in FACTORIES else value
        return value

    def _tag(self, tensor: torch.Tensor, path: Path) -> Any:
        if tensor in self._parameters:
            return ParameterItself(self._parameters[tensor])
        dtype = str(tensor.dtype).removeprefix("torch.")
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and dtype in DTYPES
        if not plain or tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
            return tensor  # `to_json` refuses it, with its path
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
    """Decode documents to values.

    Args:
        part: maps the names of a vector and a parameter to that part of the vector; raises KeyError
            if unknown.
        values, contents: as collected by a `Writer`.
        parameters: by name.
        present: the optimizer's present ``state_dict()``, the source of the program's own values.
        own: texts of these values, by path, taken when the learner was made.

    Local. If two tags of the writer named the same tensor, the reader returns the same tensor for
    both. Tensors from arrays are copies.
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

    def value(self, document: Any) -> Any:
        """Return the value of a document.

        Args:
            document: parsed JSON from a `Writer`.
        Raises:
            UserError: the document, or an object named in it, differs from a `Writer`'s form.
        """
        return mapped(from_json(document), self._leaf)

    def _leaf(self, value: Any, path: Path) -> Any:
        if isinstance(value, PartOfVector | ValuesOf):
            if value not in self._made:
                made: Any = self._vector_part if isinstance(value, PartOfVector) else self._tensor
                self._made[value] = made(value)
            return self._made[value]
        if isinstance(value, ParameterItself):
            if value.name not in self._parameters:
                raise UserError(f"names a parameter {shown(value.name)}, which does not exist")
            return self._parameters[value.name]
        if isinstance(value, WithDefault):
            if value.factory is not None and value.factory not in FACTORIES:
                raise UserError(f"names {shown(value.factory)} as the default of a dictionary")
            factory = None if value.factory is None else FACTORIES[value.factory]
            return defaultdict(factory, mapped(value.entries, self._leaf, path))
        if isinstance(value, ProgramValue):
            return self._program_value(value, path)
        return value

    def _vector_part(self, part: PartOfVector) -> torch.Tensor:
        try:
            return self._part(part.vector, part.parameter)
        except KeyError:
            raise UserError(
                f"names {shown(part.vector)} of {shown(part.parameter)}, which does not exist"
            ) from None

    def _tensor(self, stored: ValuesOf) -> torch.Tensor:
        by_value = stored.name in self._values
        array = (self._values if by_value else self._contents).get(stored.name)
        if array is None:
            raise UserError(f"lacks the array {shown(stored.name)}")
        shape = stored.shape
        if stored.dtype not in DTYPES:
            raise UserError(f"has a tensor of dtype {shown(stored.dtype)}, which is not supported")
        dtype = DTYPES[stored.dtype]
        if by_value:
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
        tensor = tensor if by_value else tensor.view(dtype).view(shape)
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
            raise UserError(
                f"was saved with {where}={own.text}, which is {present} in this optimizer"
            )
        return value


def _array_of(tensor: torch.Tensor) -> Array:
    """Return a real tensor's values as an array; without a copy if the tensor is contiguous."""
    return as_array(tensor.detach().resolve_neg().contiguous())


def _bytes_of(tensor: torch.Tensor) -> Array:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return as_array(plain.reshape(-1).view(torch.uint8))


def _axes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's axes in the order of memory if it fills its memory, else in plain order."""
    strides = tensor.stride()
    axes = tuple(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return axes if tensor.permute(axes).is_contiguous() else tuple(range(tensor.dim()))


OPTIMIZERS = "optimizers"  #: the key of the optimizers' documents, in a document of them all


def joined(parts: Iterable[tuple[str, str]]) -> str:
    """Return a document of all optimizers. Local.

    Args:
        parts: of each optimizer: a text of its parameters, and the document of its
            ``state_dict()``.
    """
    texts = (f"[{json.dumps(parameters)}, {document}]" for parameters, document in parts)
    return f'{{"{OPTIMIZERS}": [{", ".join(texts)}]}}'


def parts_of(text: str) -> list[tuple[str | None, Any]]:
    """Return the parts of a result of `joined`, with parsed documents.

    A text in any further form is the document of a single optimizer, as in checkpoints of version
    0.1.

    Raises:
        UserError: the text is not JSON, or names optimizers in another form.

    Local.
    """
    whole = parsed_text(text)
    if not isinstance(whole, dict) or [*whole] != [OPTIMIZERS]:
        return [(None, whole)]
    parts = whole[OPTIMIZERS]
    if not isinstance(parts, list) or not all(isinstance(p, list) and len(p) == 2 for p in parts):
        raise UserError("is not a list of optimizers")
    return [(parameters, document) for parameters, document in parts]


def parsed_text(document: str) -> Any:
    """Return the parsed JSON of a document.

    Raises:
        UserError: the text is not JSON.

    Local.
    """
    return parsed(document.encode(errors="replace"))


def program_values(state_dict: Any) -> dict[Path, str]:
    """Return comparable texts of the values in parameter groups that no checkpoint can hold, by
    path. Loading a checkpoint keeps the program's values. Local.
    """
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
