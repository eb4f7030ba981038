"""The Numba and CUDA kernels write the bytes of the reference, and touch nothing beside them.

The CUDA kernels run in an emulation on the CPU, and on a GPU where there is one.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from kernel_bodies import CUDA, Both, both_of, same_bytes
from kernel_cases import CASES, Case

from parallel_sgd.kernels import Blocks, cpu, cuda, cut, memory, payload_offsets, reference
from parallel_sgd.kernels.cuda import launch
from parallel_sgd.kernels.reference import MOMENT_GROUP
from parallel_sgd.kernels.top_k_reference import kept_of, top_k_offsets

SIZES = (0, 1, 31, 1000, 4096 + 5)


@pytest.fixture(params=["numba", *CUDA])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Both:
    """Each body of the kernels with its arrays."""
    return both_of(request.param, monkeypatch)


on_cuda = pytest.mark.parametrize("both", CUDA, indirect=True)


def _payload(blocks: Blocks) -> Any:
    return np.full(blocks.bytes.stop - blocks.bytes.start, 0xA5, np.uint8)


def _vector(n: int, seed: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng([n, seed]).standard_normal(n).astype(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_bit(both: Both, case: Case) -> None:
    blocks = case.blocks(1)
    for mean_threshold in (False, True):
        arguments = case.gradient, case.residual, _payload(blocks), mean_threshold
        *_, payload, _ = both("encode_1bit", blocks, *arguments)
        for add in (False, True):
            both("decode_1bit", blocks, payload, _vector(len(case.gradient), 1), add)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_levels(both: Both, case: Case, bits: int) -> None:
    blocks = case.blocks(bits)
    arguments = case.gradient, case.residual, _payload(blocks)
    *_, payload = both("encode_levels", bits, blocks, *arguments)
    for add in (False, True):
        both("decode_levels", bits, blocks, payload, _vector(len(case.gradient), 1), add)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_top_k(both: Both, case: Case) -> None:
    longest = int(np.diff(case.starts).max(initial=1))
    for kept in sorted({1, -(-longest // 20), -(-longest // 2)}):
        offsets = case.first_byte + top_k_offsets(case.starts, kept, longest)
        blocks, sizes = Blocks(case.starts, offsets), (kept, longest)
        arguments = case.gradient, case.residual, _payload(blocks)
        *_, residual, payload = both("encode_top_k", *sizes, blocks, *arguments)
        for add in (False, True):
            x = _vector(len(case.gradient), 1)
            *_, q, _ = both("decode_top_k", *sizes, blocks, payload, x, add)
            if not add:
                largest_are_sent(blocks, case.gradient + case.residual, q, residual, sizes)


def largest_are_sent(blocks: Blocks, v: Any, q: Any, residual: Any, sizes: tuple[int, int]) -> None:
    """Nothing that is not sent is larger than what is sent, nor equal to it and before it; and
    r' = v - q."""
    assert same_bytes(residual, np.where(q == 0, v, v - q))
    for own, sent, payload in blocks.views(v, q, _payload(blocks)):
        size, positions = np.abs(own), np.flatnonzero(sent)
        if payload.nbytes == 4 * own.size:
            assert same_bytes(own, sent)
            continue
        places = kept_of(own.size, *sizes)
        assert len(positions) == min(places, np.count_nonzero(own))
        rest = np.delete(size, positions)
        if len(positions) and len(rest):
            least = size[positions].min()
            assert rest.max() <= least
            equal = np.flatnonzero(size == least)
            assert np.isin(equal, positions)[: np.isin(equal, positions).sum()].all()
        assert (np.sign(sent) * own >= 0).all()


@pytest.mark.parametrize("first", [0, 5])
def test_what_is_decoded_past_the_caches(first: int) -> None:
    """As a part of much memory, where a block begins on a line of the caches and where not."""
    case = Case("long", cut([5000, 700], 1024), _vector(5700, 0), _vector(5700, 1))
    assert not memory.beyond_caches(memory.empty(5700, np.float32))
    room = memory.empty(memory.LARGE // 4, np.float32)
    out = room[first : first + 5700]
    assert memory.beyond_caches(out)

    def same(encode: str, decode: str, blocks: Blocks, *options: Any) -> None:
        kind, options = (options[:1], ()) if encode != "encode_1bit" else ((), options)
        payload, expected = _payload(blocks), np.empty_like(out)
        arguments = case.gradient, case.residual.copy(), payload
        getattr(cpu, encode)(*kind, blocks, *arguments, *options)
        getattr(reference, decode)(*kind, blocks, payload, expected, False)
        room.fill(77)
        getattr(cpu, decode)(*kind, blocks, payload, out, False)
        assert same_bytes(out, expected)
        assert (room[:first] == 77).all()
        assert (room[first + 5700 :] == 77).all()

    same("encode_1bit", "decode_1bit", case.blocks(1), False)
    for bits in (4, 8):
        same("encode_levels", "decode_levels", case.blocks(bits), bits)


@pytest.mark.parametrize("bits", [1, 4, 8])
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


@pytest.mark.parametrize("kept", [1, 20, 70])
def test_any_fields_are_decoded(both: Both, kept: int) -> None:
    """Positions that do not ascend, or lie behind the end, end the list."""
    starts = cut([300, 100], 70)
    blocks = Blocks(starts, top_k_offsets(starts, kept, 70))
    random = np.random.default_rng(kept)
    for most in (1, 40, 256):
        payload = random.integers(0, most, blocks.bytes.stop, np.uint8)
        for first in blocks.offsets[:-1]:
            payload[first : first + 8] = np.array([-0.0, -1.5], np.float32).view(np.uint8)
        for add in (False, True):
            both("decode_top_k", kept, 70, blocks, payload, _vector(400, 1), add)


@pytest.mark.parametrize("bfloat", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half(both: Both, case: Case, bfloat: bool) -> None:
    payload = np.full(2 * len(case.gradient), 0xA5, np.uint8)
    _, _, payload, _ = both("encode_half", case.gradient, case.residual, payload, bfloat)
    for add in (False, True):
        both("decode_half", payload, _vector(len(case.gradient), 1), add, bfloat)


@pytest.mark.parametrize("bfloat", [False, True])
def test_half_of_every_exponent(both: Both, bfloat: bool) -> None:
    """Each float32 sign, exponent and upper mantissa, with lower bits on both sides of halfway."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x8000, 0xFFFF):
        v = (upper | np.uint32(lower)).view(np.float32)
        v = v[np.isfinite(v)]
        residual = np.full_like(v, -0.0)  # so that v = -0 stays one
        with np.errstate(over="ignore", invalid="ignore"):
            both("encode_half", v, residual, np.zeros(2 * len(v), np.uint8), bfloat)


@pytest.mark.parametrize("bfloat", [False, True])
def test_every_half_is_decoded(both: Both, bfloat: bool) -> None:
    words = np.arange(2**16, dtype=np.uint16)
    number = (words & (0x7F80 if bfloat else 0x7C00)) != (0x7F80 if bfloat else 0x7C00)
    infinity = (words & (0x7F if bfloat else 0x3FF)) == 0
    if both.kernels is cpu and not bfloat:
        infinity[:] = False  # encoding writes none in float16, and Numba's body reads none
    payload = words[number | infinity].view(np.uint8)
    both("decode_half", payload, np.zeros(len(payload) // 2, np.float32), False, bfloat)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_largest_magnitude(both: Both, n: int, dtype: Any) -> None:
    x, limits = _vector(n, 0, dtype), np.finfo(dtype)
    for fine in (x, -np.zeros(n, dtype), np.full(n, -limits.smallest_subnormal)):
        both("largest_magnitude", fine)
    for value in (np.inf, -np.inf, np.nan, -np.nan, 1e35, -1e35, limits.tiny):
        for place in {0, n // 2, n - 1} if n else ():
            special = x.copy()
            special[place] = value
            both("largest_magnitude", special)
            if n > 1:
                special[(place + 1) % n] = np.inf  # NaN is found beside infinity too
                both("largest_magnitude", special)


@on_cuda
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
    v, third = _vector(n, 3, dtype) ** 2, 1 / 3
    both.both_ways("sgd_step", x, gradient, 0.1)
    for nesterov in (False, True):
        both.both_ways("momentum_step", x, m, gradient, 0.1, 0.9, 0.3, nesterov)
    for decay in (0.0, 0.003):
        both.both_ways("adam_step", x, m, v, gradient, third, 1e-3, 0.9, 0.999, 1e-8, decay)
        for first, least in ((0, 0.0), (1, 2.0), (MOMENT_GROUP + 63, 0.1)):
            rates, groups = (third, 1e-3, 0.9, 0.999, 1e-8, decay), (first + n) // MOMENT_GROUP + 1
            each = (_vector(groups, seed, dtype) ** 2 for seed in (4, 5))
            arguments = x, m, v, gradient, *rates, *each, first, least
            both.both_ways("adam_step_of_quantized", *arguments)
    both.both_ways("adam_step", x, 0 * m, 0 * v, 0 * gradient, 1.0, 1e-3, 0.9, 0.999, 1e-8, 0.0)
    both.both_ways("adagrad_step", x, v, gradient, third, 1e-2, 1e-10)
    both.both_ways("adagrad_step", x, 0 * v, np.maximum(gradient, 0), 1.0, 1e-2, 1e-10)
    both("compensate_delay", gradient, x, m, 0.04)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_sums_of_groups(both: Both, n: int, dtype: Any) -> None:
    for first, step in ((0, 0), (0, 1), (1, 2**31 - 1), (MOMENT_GROUP + 63, 7)):
        sums = _vector((first + n) // MOMENT_GROUP + 2, 1, dtype)
        both("add_to_groups", _vector(n, 0, dtype), first, step, sums)


def test_signs_of_groups_are_random_and_differ() -> None:
    bits = [reference.group_signs(step, group) for step in range(1, 65) for group in range(64)]
    assert len({*bits}) == len(bits)
    places = np.array([[word >> place & 1 for place in range(MOMENT_GROUP)] for word in bits])
    assert np.abs(places.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(bits))
    signs = 2.0 * places - 1
    between = signs.T @ signs / len(bits) - np.eye(MOMENT_GROUP)
    assert np.abs(between).max() < 5 / np.sqrt(len(bits))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(1, 1, 1), (3, 1000, 1), (70, 61, 5)])
def test_low_rank_product(both: Both, rows: int, columns: int, rank: int, dtype: Any) -> None:
    p, q = _vector(rank * rows, 0, dtype), _vector(rank * columns, 1, dtype)
    for subtract in (False, True):
        both("low_rank_product", p, q, _vector(rows * columns, 2, dtype), rank, subtract)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", SIZES)
def test_steps_of_local_updates(both: Both, n: int, dtype: Any) -> None:
    x, m, gradient = (_vector(n, seed, dtype) for seed in range(3))
    both.both_ways("weighted_difference", x, m, 1 / 3)
    both("averaging_step", x, gradient)
    for nesterov in (False, True):
        both("outer_momentum_step", x, m, gradient, 0.7, 0.9, 0.3, nesterov)
    both("mix", x, m, 0.4)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
def test_a_difference_that_is_not_finite(both: Both, value: float) -> None:
    for place in (0, 500, 999):
        x, start = _vector(1000, 0), _vector(1000, 1)
        x[place] = value
        with np.errstate(invalid="ignore"):
            both("weighted_difference", x, start, 0.5)


def test_longest_block(both: Both) -> None:
    starts = cut([2**20], 2**20)
    blocks = Blocks(starts, payload_offsets(starts, 4))
    v = _vector(2**20, 0)
    both("encode_levels", 4, blocks, v, 0 * v, _payload(blocks))


@on_cuda
def test_index_copies_are_shared_by_parts_and_die_with_their_blocks(both: Both) -> None:
    gc.collect()
    before = len(launch._copies)
    starts = cut([4000], 256)
    blocks = Blocks(starts, payload_offsets(starts, 1))
    parts = [blocks.part(first, first + 1) for first in range(len(blocks))]
    for part in parts:
        payload = both.cupy.zeros(part.bytes.stop - part.bytes.start, np.uint8)
        out = both.cupy.zeros(part.values.stop - part.values.start, np.float32)
        cuda.decode_1bit(part, payload, out, False)
    assert len(launch._copies) == before + 2
    del blocks, part, parts, starts
    gc.collect()
    assert len(launch._copies) == before


@pytest.mark.parametrize("name", ["encode_1bit", "encode_levels", "adam_step"])
def test_kernels_run_in_several_threads_at_once(name: str) -> None:
    """Every thread has its arrays; what a kernel keeps for itself must not be shared."""
    starts = cut([5000], 100)
    blocks = Blocks(starts, payload_offsets(starts, 1 if name == "encode_1bit" else 4))

    def work(kernels: Any, seed: int) -> bytes:
        x, r, v = _vector(5000, seed), _vector(5000, seed + 9), np.abs(_vector(5000, seed + 18))
        payload = _payload(blocks)
        if name == "encode_1bit":
            kernels.encode_1bit(blocks, x, r, payload, False)
        elif name == "encode_levels":
            kernels.encode_levels(4, blocks, x, r, payload)
        else:
            kernels.adam_step(x, r, v, v[::-1].copy(), 0.5, 0.1, 0.9, 0.99, 1e-8, 0.1)
        return b"".join(array.tobytes() for array in (x, r, v, payload))

    results = {}

    def repeat(seed: int) -> None:
        results[seed] = {work(cpu, seed) for _ in range(20)}

    threads = [threading.Thread(target=repeat, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: {work(reference, seed)} for seed in range(4)}
