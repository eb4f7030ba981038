"""The Numba kernels write the bytes of the reference, and touch nothing beside their arrays."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from kernel_cases import CASES

from parallel_sgd.kernels import cpu, reference
from parallel_sgd.kernels.blocks import Blocks, cut, payload_offsets

GUARD = 32  # values on either side of an array that no kernel may touch
SIZES = (0, 1, 31, 1000, 4101)


def both(name, *arguments):
    """Call a kernel and its reference on copies of the arguments; returns the reference's."""
    expected = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    guarded = [guard(a) if isinstance(a, np.ndarray) else (None, a) for a in arguments]
    result = getattr(cpu, name)(*(a for _, a in guarded))
    assert repr(result) == repr(getattr(reference, name)(*expected))
    for position, (whole, _) in enumerate(guarded):
        if whole is not None:
            everything = guard(expected[position])[0]
            same = whole.tobytes() == everything.tobytes()  # a diff of bytes would take minutes
            assert same, f"{name}: argument {position} differs"
    return expected


def both_ways(name, x, *rest):
    """A step in place, and one with the new x elsewhere, which is all that sets them apart."""
    new_x, *changed = both(name, x, *rest)
    old_x, *same, out = both(name, x, *rest, np.full_like(x, np.nan))
    assert old_x.tobytes() == x.tobytes()
    for a, b in zip([new_x, *changed], [out, *same], strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def guard(array):
    """An array with marked values on both sides, and the part of it that holds the given one."""
    whole = np.full(len(array) + 2 * GUARD, 77, array.dtype)
    inside = whole[GUARD : GUARD + len(array)]
    inside[:] = array
    return whole, inside


def payload_of(blocks):
    return np.full(blocks.bytes.stop - blocks.bytes.start, 0xA5, np.uint8)


def vector(n, seed, dtype=np.float32):
    return np.random.default_rng([n, seed]).standard_normal(n).astype(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_bit(case):
    blocks = case.blocks(1)
    for mean_threshold in (False, True):
        arrays = case.gradient, case.residual, payload_of(blocks)
        payload = both("encode_1bit", blocks, *arrays, mean_threshold)[3]
        for add in (False, True):
            both("decode_1bit", blocks, payload, vector(len(case.gradient), 1), add)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_levels(case, bits):
    blocks = case.blocks(bits)
    payload = both("encode_levels", bits, blocks, case.gradient, case.residual, payload_of(blocks))[
        4
    ]
    for add in (False, True):
        both("decode_levels", bits, blocks, payload, vector(len(case.gradient), 1), add)


@pytest.mark.parametrize("bfloat", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half(case, bfloat):
    payload = np.zeros(2 * len(case.gradient), np.uint8)
    payload = both("encode_half", case.gradient, case.residual, payload, bfloat)[2]
    for add in (False, True):
        both("decode_half", payload, vector(len(case.gradient), 1), add, bfloat)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_any_payload_is_decoded_alike(bits):
    """Also one that encoding never writes, with the most negative code and bits behind the end."""
    starts = cut([300, 100], 70)
    blocks = Blocks(starts, payload_offsets(starts, bits))
    payload = np.random.default_rng(bits).integers(0, 256, blocks.bytes.stop, np.uint8)
    for first in blocks.offsets[:-1]:
        payload[first : first + 8] = np.float32([-0.0, -1.5]).view(np.uint8)
    for add in (False, True):
        arguments = blocks, payload, vector(400, bits), add
        both("decode_1bit", *arguments) if bits == 1 else both("decode_levels", bits, *arguments)


def test_float16_of_every_exponent():
    """Each float32 sign, exponent and upper mantissa, with lower bits on both sides of halfway."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x8000, 0xFFFF):
        v = (upper | np.uint32(lower)).view(np.float32)
        v = v[np.isfinite(v)]
        payload = np.zeros(2 * len(v), np.uint8)
        residual = np.full_like(v, -0.0)  # so that v = -0 stays one
        cpu.encode_half(v, residual, payload, False)
        expected = np.clip(v, -65504, 65504).astype(np.float16)
        assert np.array_equal(payload.view(np.uint16), expected.view(np.uint16))
        assert np.array_equal(residual, v - expected.astype(np.float32))


def test_every_finite_float16_is_decoded():
    half = np.arange(1 << 16, dtype=np.uint16)
    half = half[np.isfinite(half.view(np.float16))]
    out = np.empty(len(half), np.float32)
    cpu.decode_half(half.view(np.uint8), out, False, False)
    expected = half.view(np.float16).astype(np.float32)
    assert np.array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_optimizer_steps(n, dtype):
    x, m, g = (vector(n, seed, dtype) for seed in range(3))
    v = np.abs(vector(n, 3, dtype))
    both_ways("sgd_step", x, g, 0.01)
    for nesterov in (False, True):
        both_ways("momentum_step", x, m, g, 0.1, 0.9, 0.37, nesterov)
    both_ways("adam_step", x, m, v, g, 1 / 7, 0.01, 0.9, 0.999, 1e-8, 0.0)
    both_ways("adam_step", x, m, v, g, 1 / 7, 0.01, 0.9, 0.999, 1e-8, 0.003)
    both_ways("adagrad_step", x, v, g, 1 / 7, 0.01, 1e-10)
    both_ways("adagrad_step", x, 0 * v, np.where(g < 0, 0, g), 1.0, 0.1, 1e-10)
    both("compensate_delay", g, x, m, 0.04)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_largest_magnitude(n, dtype):
    x = vector(n, 0, dtype)
    both("largest_magnitude", x)
    for value in (np.inf, -np.inf, np.nan, -np.nan, 1e35, -1e35, np.finfo(dtype).tiny):
        for place in {0, n // 2, n - 1} if n else ():
            y = x.copy()
            y[place] = value
            both("largest_magnitude", y)
            if n > 1:
                y[(place + 1) % n] = np.inf  # NaN is found beside infinity too
                assert math.isnan(cpu.largest_magnitude(y)) == math.isnan(value)


@pytest.mark.parametrize("name", ["encode_1bit", "encode_levels", "adam_step"])
def test_kernels_run_in_several_threads_at_once(name):
    """Every thread has its arrays; what a kernel keeps for itself must not be shared."""
    starts = cut([5000], 100)
    blocks = {b: Blocks(starts, payload_offsets(starts, b)) for b in (1, 4)}

    def work(kernels, seed):
        x, r, v = vector(5000, seed), vector(5000, seed + 9), np.abs(vector(5000, seed + 18))
        payload = payload_of(blocks[4])
        if name == "encode_1bit":
            payload = payload_of(blocks[1])
            kernels.encode_1bit(blocks[1], x, r, payload, False)
        elif name == "encode_levels":
            kernels.encode_levels(4, blocks[4], x, r, payload)
        else:
            kernels.adam_step(x, r, v, v[::-1].copy(), 0.5, 0.1, 0.9, 0.99, 1e-8, 0.1)
        return x.tobytes() + r.tobytes() + v.tobytes() + payload.tobytes()

    results = {}

    def repeat(seed):
        results[seed] = {work(cpu, seed) for _ in range(20)}

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: {work(reference, seed)} for seed in range(4)}
