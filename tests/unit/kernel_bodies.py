"""Each body of the kernels beside the reference: of Numba, and of CUDA, emulated and on a GPU."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import cuda_emulation
import numpy as np
import pytest

from parallel_sgd.kernels import cpu, cuda, reference

GUARD = 64  # values on either side of an array that no kernel may touch


def _has_gpu() -> bool:
    try:
        return bool(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no device: each has its own
        return False


CUDA = ["emulation", "gpu"] if _has_gpu() else ["emulation"]
EMULATED = cuda_emulation.cupy()


class Both:
    """Calls a kernel and its reference on copies of the same arrays, and compares all bytes."""

    def __init__(self, kernels: ModuleType, cupy: Any) -> None:
        self.kernels, self.cupy = kernels, cupy

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        expected = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        guarded = [self.guard(a) if isinstance(a, np.ndarray) else (None, a) for a in arguments]
        result = getattr(self.kernels, name)(*(a for _, a in guarded))
        assert repr(result) == repr(getattr(reference, name)(*expected))
        for position, (whole, _) in enumerate(guarded):
            if whole is not None:
                everything = self.guard(expected[position])[0]
                same = same_bytes(self.cupy.asnumpy(whole), self.cupy.asnumpy(everything))
                assert same, f"{name}: argument {position} differs"  # a diff would take minutes
        return expected

    def both_ways(self, name: str, x: Any, *rest: Any) -> None:
        """A step in place, and one with the new x elsewhere, which is all that sets them apart."""
        new_x, *changed = self(name, x, *rest)
        old_x, *same, out = self(name, x, *rest, np.full_like(x, np.nan))
        assert same_bytes(old_x, x)
        for a, b in zip([new_x, *changed], [out, *same], strict=True):
            assert same_bytes(np.asarray(a), np.asarray(b))

    def guard(self, array: Any) -> tuple[Any, Any]:
        """An array of the kernels' kind between marked values, and the part with the given one."""
        whole = np.full(len(array) + 2 * GUARD, 77, array.dtype)
        whole[GUARD : GUARD + len(array)] = array
        there = self.cupy.asarray(whole)
        return there, there[GUARD : GUARD + len(array)]

    def is_guarded(self, whole: Any) -> bool:
        """Whether nothing beside the part has changed."""
        beside = np.delete(self.cupy.asnumpy(whole), slice(GUARD, len(whole) - GUARD))
        return bool((beside == 77).all())


def same_bytes(a: Any, b: Any) -> bool:
    """In every byte; but a NaN is a NaN, of which processors write different ones."""
    if a.dtype.kind == "f":
        a, b = (np.where(np.isnan(array), np.nan, array) for array in (a, b))
    return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())


def both_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Both:
    """The body of this name, "numba" or one of CUDA, with its arrays."""
    if name == "numba":
        return Both(cpu, EMULATED)  # whose arrays are NumPy's
    if name == "emulation":
        assert cuda_emulation.COMPILER, "the CUDA kernels are emulated by means of a C compiler"
        monkeypatch.setitem(sys.modules, "cupy", EMULATED)
    return Both(cuda, importlib.import_module("cupy"))
