"""Tensors and arrays share their memory: NumPy's on the CPU, CuPy's, by DLPack, on a GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from parallel_sgd import UserError
from parallel_sgd.torch.arrays import as_array, as_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_they_share_memory(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    array = as_array(tensor.T)
    assert array.shape == (4, 3) and array.dtype == np.dtype(str(dtype).partition(".")[2])
    array[1, 2] = 99
    assert tensor[2, 1] == 99
    again = as_tensor(array)
    assert again.dtype == dtype and again.data_ptr() == tensor.data_ptr()


def test_parameters_are_seen_without_their_gradient():
    parameter = torch.nn.Parameter(torch.zeros(3))
    as_array(parameter)[...] = 1
    assert parameter.tolist() == [1, 1, 1] and parameter.requires_grad


def test_what_has_no_array():
    with pytest.raises(UserError, match="bfloat16 has no array"):
        as_array(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(UserError, match="on meta has no array"):
        as_array(torch.zeros(3, device="meta"))


class OnGpu:
    """A stand-in for a tensor on a GPU, and for what DLPack makes of it: no values, one memory."""

    device, layout = SimpleNamespace(type="cuda"), torch.strided

    def detach(self) -> OnGpu:
        return self


@pytest.fixture
def cupy(monkeypatch):
    module = ModuleType("cupy")

    class ndarray:
        def __init__(self, memory):
            self.memory = memory

    module.ndarray, module.from_dlpack = ndarray, ndarray
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(torch, "from_dlpack", lambda array: array.memory)
    return module


def test_on_a_gpu_they_share_memory_by_dlpack(cupy):
    tensor = OnGpu()
    array = as_array(tensor)
    assert isinstance(array, cupy.ndarray) and array.memory is tensor
    assert as_tensor(array) is tensor


def test_a_gpu_needs_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UserError, match="tensors on a GPU need CuPy"):
        as_array(OnGpu())
