"""Encoding of PyTorch's tensors, dtypes, devices and sizes as `parallel_sgd.plain_values`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..errors import UserError
from ..plain_values import add_type, on_host
from ..validation import shown


def _parts_of(tensor: torch.Tensor) -> list[Any]:
    """Return dtype, shape, device and bytes of a tensor, in C order.

    Raises:
        UserError: the tensor is not dense, or requires a gradient.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UserError("is not a plain dense tensor: a checkpoint can restore no other kind")
    if tensor.requires_grad:
        raise UserError("needs a gradient, which a checkpoint cannot restore: detach() it")
    plain = tensor.resolve_conj().resolve_neg().contiguous().flatten()
    data = plain.view(torch.uint8).cpu().numpy().tobytes() if plain.numel() else b""
    return [_name_of(tensor.dtype), list(tensor.shape), str(tensor.device), data]


def _tensor_of(parts: Any) -> torch.Tensor:
    """Return the tensor for the result of `_parts_of`; on the CPU if its device does not exist
    here.
    """
    name, shape, device, data = parts
    dtype = _dtype_of(name)
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    if math.prod(shape) * dtype.itemsize != len(data) or any(length < 0 for length in shape):
        raise ValueError(f"a tensor of {shown(shape)} does not have {len(data)} bytes")
    if dtype == torch.bool and max(data, default=0) > 1:
        raise ValueError("a truth value must be 0 or 1")
    try:
        whole = (values.view(dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)
    except RuntimeError as error:  # PyTorch's error for an impossible shape
        raise ValueError(str(error)) from None
    place = _device_of(device)
    if on_host():
        return whole
    try:
        return whole.to(place)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(
            f"holds a tensor on {device}, which has not enough memory: {error}"
        ) from None
    except (AssertionError, ImportError, RuntimeError):  # no such device on this machine
        return whole


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype


def _device_of(name: str) -> torch.device:
    try:
        return torch.device(str(name))
    except RuntimeError:
        raise ValueError(f"{shown(name)} is not a device") from None


add_type(torch.Tensor, "torch.Tensor", _parts_of, _tensor_of)
add_type(torch.Size, "torch.Size", list, torch.Size)
add_type(torch.dtype, "torch.dtype", _name_of, _dtype_of)
add_type(torch.device, "torch.device", str, _device_of)
