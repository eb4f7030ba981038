"""Texts for the comparison of values and optimizers between ranks: equal for equal ones. Local."""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from ...validation import ADDRESS
from ..arrays import checksum_of
from .tags import mapped

SHOWN_VALUES = 16  #: the most values of a tensor in a text

DEEPEST = 8
"""The most levels of nested values: an object may contain itself."""


def comparable(value: Any, depth: int = DEEPEST) -> str:
    """Return a text with the comparable parts of a value.

    A function gives its name and bound arguments; a method its name and its object's class; any
    further object its class and attributes; a tensor its values, or a checksum. A text contains
    neither addresses nor the number of a rank's GPU.
    """

    def inner(part: Any) -> str:
        return comparable(part, depth - 1)

    if depth < 0:
        return "..."
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _tensor_text(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{inner(k)}: {inner(v)}" for k, v in value.items()) + "}"
    if kind is list:
        return "[" + ", ".join(map(inner, value)) + "]"
    if kind is tuple:
        return "(" + ", ".join(map(inner, value)) + ")"
    if isinstance(value, set | frozenset):
        return f"{kind.__name__}(" + ", ".join(sorted(map(inner, value))) + ")"
    if isinstance(value, functools.partial):
        return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    if isinstance(value, types.MethodType):
        owner = value.__self__  # its attributes may change during training
        return (
            f"{inner(value.__func__)} of {inner(owner if isinstance(owner, type) else type(owner))}"
        )
    if isinstance(value, types.FunctionType):
        return _function_text(value, inner)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    shows_address: Any = kind.__repr__
    if shows_address is object.__repr__:
        return f"{kind.__module__}.{kind.__qualname__}({inner(getattr(value, '__dict__', {}))})"
    return ADDRESS.sub("", repr(value))


def _tensor_text(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or tensor.is_meta:
        return f"tensor({dtype} {list(tensor.shape)})"
    if tensor.numel() <= SHOWN_VALUES:
        return f"tensor({tensor.tolist()}, {dtype})"
    return f"tensor({dtype} {list(tensor.shape)} with checksum {checksum_of(tensor):08x})"


def _function_text(function: types.FunctionType, inner: Any) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    if function.__name__ == "<lambda>":
        name += f" of line {function.__code__.co_firstlineno}"
    bound = [function.__defaults__, function.__kwdefaults__]
    bound += [_content(cell) for cell in function.__closure__ or ()]
    bound = [part for part in bound if part is not None]
    return f"{name}({', '.join(map(inner, bound))})" if bound else name


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def state_fingerprint(optimizers: Iterable[Any]) -> dict[str, str]:
    """Return a fingerprint of the optimizers' earlier training, for comparison between ranks.

    Args:
        optimizers: PyTorch's.

    Local.
    """
    known = checksum = 0

    def add(value: Any, path: Any) -> Any:
        nonlocal checksum
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            checksum = checksum_of(value, zlib.crc32(repr(path[1:]).encode(), checksum))
        elif "param_groups" not in path:
            checksum = zlib.crc32(f"{path} {comparable(value)}".encode(), checksum)
        return value

    for optimizer in optimizers:
        state_dict = optimizer.state_dict()
        mapped({key: value for key, value in state_dict.items() if key != "param_groups"}, add)
        state = state_dict.get("state")
        known += sum(map(bool, state.values())) if isinstance(state, dict) else 0
    kept = f"of {known} parameters, with checksum {checksum:08x}" if checksum else "none"
    return {"state of the optimizer": kept}
