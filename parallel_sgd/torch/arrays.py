"""PyTorch's tensors as arrays, and arrays as tensors: the same memory, seen from either side."""

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

FLOATS = (torch.float16, torch.float32, torch.float64)  #: that arrays have
COMPLEX = (torch.complex64, torch.complex128)


def as_array(tensor: torch.Tensor) -> Array:
    """A tensor's values, without its gradient: NumPy's on the CPU, CuPy's on a GPU.

    Args:
        tensor: of any shape and strides, dense, of a dtype that arrays have: bfloat16 has none.
    Returns:
        An array of the same memory, shape and dtype: what is written to one is seen in the other.
    Raises:
        UserError: the tensor's device or dtype has no arrays, or CuPy is missing.

    Local. Nothing is copied. On a GPU what PyTorch's current stream still does to the tensor comes
    before what CuPy's current stream does next; for the way back there is `on_default_stream`.
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
    """An array's values as a tensor: on the CPU of NumPy's, on its GPU of CuPy's.

    Args:
        array: of any shape, writable, of a dtype that tensors have.
    Returns:
        A tensor of the same memory, shape and dtype, which needs no gradient.

    Local. Nothing is copied.
    """
    if array_module(array) is np:
        return torch.from_numpy(array)
    return torch.from_dlpack(array)


def host_array(tensor: torch.Tensor) -> Any:
    """A tensor's values as an array of NumPy's, of its shape, on the CPU; of a float or complex
    dtype that NumPy lacks in float32 or complex64, which hold them all. Local."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = tensor if tensor.dtype in COMPLEX else tensor.to(torch.complex64)
    elif tensor.is_floating_point() and tensor.dtype not in FLOATS:
        tensor = tensor.float()
    return tensor.cpu().numpy()


def checksum_of(tensor: torch.Tensor, before: int = 0) -> int:
    """CRC-32 of a dense tensor's bytes, after those of others. Local."""
    values = tensor.detach().flatten().contiguous().view(torch.uint8)
    return zlib.crc32(values.cpu().numpy(), before)


@contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """For a `with` block a GPU is the current one, and PyTorch works on the stream that CuPy works
    on, the default one.

    What it has begun on a stream of the program's choice comes before, and what it begins there
    afterwards comes after the block. Nothing on a CPU. Local; waits for nothing.
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
    """Wait until PyTorch's current stream of a tensor's GPU is done: before another thread goes on.
    Local."""
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise UserError(
            "tensors on a GPU need CuPy: pip install '.[cuda13x]' from the checkout, or [cuda12x]"
        ) from error
    return cupy
