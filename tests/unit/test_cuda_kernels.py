"""The CUDA kernels write the bytes of the reference: emulated on the CPU, and on a GPU if any."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any

import cuda_emulation
import numpy as np
import pytest
from kernel_cases import CASES, Case

from parallel_sgd.kernels import cuda, reference
from parallel_sgd.kernels.blocks import Blocks, cut, payload_offsets
from parallel_sgd.kernels.cuda import launch

GUARD = 64  # values on either side of an array that no kernel may touch
SIZES = (0, 1, 31, 1000, 4096 + 5)


def _has_gpu() -> bool:
    try:
        return bool(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no device: each has its own
        return False


GPU = _has_gpu()
EMULATED = cuda_emulation.cupy()


@pytest.fixture(params=["emulation", "gpu"] if GPU else ["emulation"])
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy, or what takes its place."""
    if request.param == "emulation":
        if cuda_emulation.COMPILER is None:
            pytest.skip("no C compiler")
        monkeypatch.setitem(sys.modules, "cupy", EMULATED)
    return importlib.import_module("cupy")


class Both:
    """Calls a kernel and its reference on copies of the same arrays, and compares all bytes."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        expected = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        guarded = [self._guard(a) if isinstance(a, np.ndarray) else (None, a) for a in arguments]
        expected_result = getattr(reference, name)(*expected)
        result = getattr(cuda, name)(*(a for _, a in guarded))
        assert repr(result) == repr(expected_result)
        for position, (whole, _) in enumerate(guarded):
            if whole is not None:
                everything = self._guard(expected[position])[0]
                assert _same(self.cupy.asnumpy(whole), self.cupy.asnumpy(everything)), (
                    f"{name}: argument {position} differs"
                )
        return expected

    def both_ways(self, name: str, x: Any, *rest: Any) -> None:
        """A step in place, and one with the new x elsewhere, which is all that sets them apart."""
        new_x, *changed = self(name, x, *rest)
        old_x, *same, out = self(name, x, *rest, np.full_like(x, np.nan))
        assert _same(old_x, x)
        for a, b in zip([new_x, *changed], [out, *same], strict=True):
            assert _same(np.asarray(a), np.asarray(b))

    def _guard(self, array: Any) -> tuple[Any, Any]:
        """A device array, and the part of it that holds these values."""
        whole = np.full(len(array) + 2 * GUARD, 77, array.dtype)
        whole[GUARD : GUARD + len(array)] = array
        there = self.cupy.asarray(whole)
        return there, there[GUARD : GUARD + len(array)]


def _same(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())


@pytest.fixture
def both(cupy: Any) -> Both:
    return Both(cupy)


def _payload(blocks: Blocks) -> Any:
    return np.full(blocks.bytes.stop - blocks.bytes.start, 0xA5, np.uint8)


def _vector(n: int, seed: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng([n, seed]).standard_normal(n).astype(dtype)


@pytest.mark.skipif(not GPU, reason="no GPU: the kernels run in the emulation only")
def test_there_is_a_gpu() -> None:
    assert GPU


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_bit(both: Both, case: Case) -> None:
    blocks = case.blocks(1)
    out = _vector(len(case.gradient), 1)
    for mean_threshold in (False, True):
        arguments = case.gradient, case.residual, _payload(blocks), mean_threshold
        *_, payload, _ = both("encode_1bit", blocks, *arguments)
        for add in (False, True):
            both("decode_1bit", blocks, payload, out, add)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_levels(both: Both, case: Case, bits: int) -> None:
    blocks = case.blocks(bits)
    out = _vector(len(case.gradient), 1)
    arguments = case.gradient, case.residual, _payload(blocks)
    *_, payload = both("encode_levels", bits, blocks, *arguments)
    for add in (False, True):
        both("decode_levels", bits, blocks, payload, out, add)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_any_payload_is_decoded(both: Both, bits: int) -> None:
    """Even what encoding never writes: levels of -0, the lowest code, bits behind the end."""
    starts = cut([300, 100], 70)
    blocks = Blocks(starts, payload_offsets(starts, bits))
    payload = np.random.default_rng(bits).integers(0, 256, blocks.bytes.stop, np.uint8)
    for first in blocks.offsets[:-1]:
        payload[first : first + 8] = np.array([-0.0, -1.5], np.float32).view(np.uint8)
    for add in (False, True):
        arguments = blocks, payload, _vector(400, bits), add
        both("decode_1bit", *arguments) if bits == 1 else both("decode_levels", bits, *arguments)


@pytest.mark.parametrize("bfloat", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half(both: Both, case: Case, bfloat: bool) -> None:
    payload = np.full(2 * len(case.gradient), 0xA5, np.uint8)
    _, _, payload, _ = both("encode_half", case.gradient, case.residual, payload, bfloat)
    for add in (False, True):
        both("decode_half", payload, _vector(len(case.gradient), 1), add, bfloat)


@pytest.mark.parametrize("bfloat", [False, True])
def test_every_half_is_decoded(both: Both, bfloat: bool) -> None:
    words = np.arange(2**16, dtype=np.uint16)
    number = (words & (0x7F80 if bfloat else 0x7C00)) != (0x7F80 if bfloat else 0x7C00)
    infinity = (words & (0x7F if bfloat else 0x3FF)) == 0
    payload = words[number | infinity].view(np.uint8)
    both("decode_half", payload, np.zeros(len(payload) // 2, np.float32), False, bfloat)


def test_half_beyond_its_range(both: Both) -> None:
    gradient = np.array([3e38, -3e38, 3.4e38, -3.4e38, 65519.9, -1e5], np.float32)
    with np.errstate(over="ignore"):
        for bfloat in (False, True):
            payload = np.zeros(2 * len(gradient), np.uint8)
            both("encode_half", gradient, np.zeros_like(gradient), payload, bfloat)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_largest_magnitude(both: Both, n: int, dtype: Any) -> None:
    x = _vector(n, 0, dtype)
    both("largest_magnitude", x)
    for value in (-1e30, -np.inf, np.inf, np.nan, -np.nan):
        for place in (0, n // 2, n - 1)[: 3 * n]:
            special = x.copy()
            special[place] = value
            both("largest_magnitude", special)
    both("largest_magnitude", -np.zeros(n, dtype))
    both("largest_magnitude", np.full(n, -np.finfo(dtype).smallest_subnormal))


def test_largest_magnitude_in_turns(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_MOST_GRID", 2)
    for place in (0, 1024, 2048, 5000, 7003):
        x = np.zeros(7004, np.float32)
        x[place] = -3
        both("largest_magnitude", x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_optimizer_steps(both: Both, n: int, dtype: Any) -> None:
    x, m, gradient = (_vector(n, seed, dtype) for seed in range(3))
    both.both_ways("sgd_step", x, gradient, 0.1)
    for nesterov in (False, True):
        both.both_ways("momentum_step", x, m, gradient, 0.1, 0.9, 0.3, nesterov)
    v = _vector(n, 3, dtype) ** 2
    both.both_ways("adam_step", x, m, v, gradient, 1 / 3, 1e-3, 0.9, 0.999, 1e-8, 1e-5)
    both.both_ways("adam_step", x, 0 * m, 0 * v, 0 * gradient, 1.0, 1e-3, 0.9, 0.999, 1e-8, 0.0)
    both.both_ways("adagrad_step", x, v, gradient, 1 / 3, 1e-2, 1e-10)
    both.both_ways("adagrad_step", x, 0 * v, 0 * gradient, 1.0, 1e-2, 1e-10)
    both("compensate_delay", gradient, x, m, 0.04)


def test_longest_block(both: Both) -> None:
    starts = cut([2**20], 2**20)
    blocks = Blocks(starts, payload_offsets(starts, 4))
    v = _vector(2**20, 0)
    both("encode_levels", 4, blocks, v, 0 * v, _payload(blocks))


def test_index_copies_are_shared_by_parts_and_die_with_their_blocks(cupy: Any) -> None:
    gc.collect()
    before = len(launch._copies)
    starts = cut([4000], 256)
    blocks = Blocks(starts, payload_offsets(starts, 1))
    parts = [blocks.part(first, first + 1) for first in range(len(blocks))]
    for part in parts:
        payload = cupy.zeros(part.bytes.stop - part.bytes.start, np.uint8)
        out = cupy.zeros(part.values.stop - part.values.start, np.float32)
        cuda.decode_1bit(part, payload, out, False)
    assert len(launch._copies) == before + 2
    del blocks, part, parts, starts
    gc.collect()
    assert len(launch._copies) == before
