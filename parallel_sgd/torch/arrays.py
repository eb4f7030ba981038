"""Conversion between PyTorch tensors and arrays that share their memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from ..kernels import array_module

Array = Any  #: a NumPy or CuPy array

FLOATS = (torch.float16, torch.float32, torch.float64)  #: dtypes that arrays have, too
COMPLEX = (torch.complex64, torch.complex128)


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor's values as an array: NumPy's for the CPU, CuPy's for a GPU.

    Args:
        tensor: dense, of any shape and strides, of a dtype that arrays have (not bfloat16). Its
            gradient is ignored.
    Returns:
        An array of the same memory, shape and dtype: a write to either is visible in both.
    Raises:
        UserError: arrays do not exist for the tensor's device or dtype, or CuPy is missing.

    Local. No copy. On a GPU, pending work on PyTorch's current stream is ordered before later work
    on CuPy's current stream. For the opposite order see `on_default_stream`.
    """
    tensor = tensor.detach()
    kind = tensor.device.type
    if kind not in ("cpu", "cuda"):
        raise UserError(f"a tensor on {tensor.device} has no array: it must be on cpu or cuda")
    if tensor.layout != torch.strided:
        raise UserError("a sparse tensor has no array")
    try:
        return tensor.numpy() if kind == "cpu" else _cupy().from_dlpack(tensor)
    except (BufferError, TypeError) as error:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"a tensor of {dtype} has no array of that type") from error


def as_tensor(array: Array) -> torch.Tensor:
    """Return an array's values as a tensor: on the CPU for NumPy, on the array's GPU for CuPy.

    Args:
        array: of any shape, writable, of a dtype that tensors have.
    Returns:
        A tensor of the same memory, shape and dtype, without a gradient.

    Local. No copy.
    """
    if array_module(array) is np:
        return torch.from_numpy(array)
    return torch.from_dlpack(array)


def host_array(tensor: torch.Tensor) -> Any:
    """Return a tensor's values as a NumPy array of its shape, on the CPU. Float and complex dtypes
    unknown to NumPy become float32 and complex64, without loss. Local.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = tensor if tensor.dtype in COMPLEX else tensor.to(torch.complex64)
    elif tensor.is_floating_point() and tensor.dtype not in FLOATS:
        tensor = tensor.float()
    return tensor.cpu().numpy()


def checksum_of(tensor: torch.Tensor, before: int = 0) -> int:
    """Return the CRC-32 of a dense tensor's bytes, continued from the checksum `before`. Local."""
    values = tensor.detach().flatten().contiguous().view(torch.uint8)
    return zlib.crc32(values.cpu().numpy(), before)


@contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """Make a GPU current, and its default stream PyTorch's current stream, for a `with` block.

    CuPy works on the default stream. Earlier work on the program's current stream is ordered before
    the block, and later work there after the block. No effect on the CPU. Local; does not wait.
    """
    if device.type != "cuda":
        yield
        return
    one, chosen = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
    one.wait_stream(chosen)
    try:
        with torch.cuda.device(device), torch.cuda.stream(one):
            yield
    finally:
        chosen.wait_stream(one)


def finish_on_stream(tensor: torch.Tensor) -> None:
    """Wait for PyTorch's current stream on a tensor's GPU, before another thread continues.
    Local.
    """
    if tensor.device.type == "cuda":
        # bounded: this rank's GPU: the others wait, and end the job
        torch.cuda.current_stream(tensor.device).synchronize()


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise UserError(
            "tensors on a GPU need CuPy: pip install '.[cuda13x]' from the checkout, or [cuda12x]"
        ) from error
    return cupy
