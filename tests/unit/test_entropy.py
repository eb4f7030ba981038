"""The entropy code: its promises, and that each body has the bytes of the reference."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import subprocess
import sys
from ctypes import CDLL, addressof, c_char, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bodies import CUDA, EMULATED, Both, both_of, same_bytes
from numba import njit, types
from numba.core.registry import cpu_target

from parallel_sgd.kernels import cpu, reference, words
from parallel_sgd.kernels.entropy_reference import (
    BLOCK,
    DAMAGED,
    LARGEST,
    head_bytes,
    least_bytes,
    most_bytes,
)

F32 = np.float32
STEP = 0.375  # a bfloat16
LENGTHS = (0, 1, 2, 31, 32, 33, 63, 64, 65, 1000, 2047, 2048, 2049, 5000)
PLACES = (0, 1, 31, 32, 63, 64, 1000, 2046, 2047, 2048, 2062)


@pytest.fixture(params=["numba", *CUDA])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Both:
    """Each body of the kernels with its arrays."""
    return both_of(request.param, monkeypatch)


@functools.cache
def _values(n: int) -> dict[str, Any]:
    """Vectors of every density and magnitude, in steps. Copy them before you write."""
    random = np.random.default_rng(n)
    noise, laplace, uneven = (random.standard_normal(n) for _ in range(3))
    runs = np.repeat(np.exp(2 * random.standard_normal(n // 64 + 1) - 2), 64)[:n]
    return {
        "zeros": np.zeros(n),
        "live ones": np.ones(n),
        "all 127": np.full(n, 127),
        "all -128": np.full(n, -128),
        "all 32767": np.full(n, 32767),
        "all -32767": np.full(n, -32767),
        "clipped": np.copysign(1e9, noise),
        **{f"noise of {scale}": noise * scale for scale in (0.2, 0.5, 1, 3, 40, 5000, 20000)},
        "raw with zeros": np.where(random.random(n) < 0.05, 0, np.copysign(30000, noise)),
        "few and large": np.where(random.random(n) < 0.05, np.copysign(30000, noise), 0),
        "heavy tails": noise * np.exp(2 * uneven),
        "live in places": noise * runs,
        "about 127": random.choice([0, 1, -1, 126, 127, 128, -127, -128, -129], n),
        "seldom above 127": np.where(random.random(n) < 0.01, 300 * laplace, noise * 0.4),
        "ones": noise > 0.5,
        "half are live": np.arange(n) % 2,
        "ties": np.round(2 * noise) / 2,
    }


def _split(v: Any, step: float = STEP) -> tuple[Any, Any]:
    """A gradient and a residual whose sum is about v steps."""
    v = (v * F32(step)).astype(F32)
    residual = (v / 3).astype(F32)
    return v - residual, residual


def _out(n: int) -> Any:
    """What is added to: values, and zeros of both signs."""
    out = np.linspace(-3, 3, n, dtype=F32)
    out[::3], out[1::3] = -0.0, 0.0
    return out


def _encode_alike(both: Both, gradient: Any, residual: Any, room: int, step: float) -> Any:
    """The message and what is lost, of the reference: this body must have the same. Behind the
    message it may write what it likes into the payload."""
    lost, payload = residual.copy(), np.full(room, 0xA5, np.uint8)
    whole, part = both.guard(payload)
    whole_residual, residual = both.guard(residual)
    whole_gradient, part_of_gradient = both.guard(lost if gradient is None else gradient)
    given = None if gradient is None else part_of_gradient
    length = both.kernels.encode_entropy(given, residual, part, step)
    assert length == reference.encode_entropy(gradient, lost, payload, step)
    assert same_bytes(both.cupy.asnumpy(residual), lost)
    assert same_bytes(both.cupy.asnumpy(part)[:length], payload[:length])
    assert gradient is None or same_bytes(both.cupy.asnumpy(given), gradient)
    assert all(map(both.is_guarded, (whole, whole_residual, whole_gradient)))
    return payload[:length], lost


def _check(
    both: Both, gradient: Any, residual: Any, room: int | None = None, step: float = STEP
) -> tuple[Any, float]:
    """Encode, decode in both ways, and check what is promised. The message, and its step."""
    n = len(residual)
    v = residual if gradient is None else gradient + residual
    given = most_bytes(n) if room is None else room
    message, lost = _encode_alike(both, gradient, residual, given, step)
    assert len(message) == int(message[:4].view(np.uint32)[0]) <= most_bytes(n)
    used = float(message[4:8].view(F32)[0])
    assert room is not None or used == step
    both("decode_entropy", message, _out(n), True)
    q = both("decode_entropy", message, _out(n), False)[1].astype(float)
    clipped = np.abs(q) >= LARGEST * used
    assert (v.astype(float) == q + lost)[~clipped].all()
    most = used * (0.5 + 2.0**-22 * np.abs(q) / used)  # v * (1 / step) has two roundings
    assert (np.abs(lost) <= most)[~clipped].all()
    return message, used


@pytest.mark.parametrize("name", _values(1))
def test_every_kind(both: Both, name: str) -> None:
    for n in (70, BLOCK + 15):
        _check(both, *_split(_values(n)[name]))


@pytest.mark.parametrize("n", LENGTHS)
def test_every_length(both: Both, n: int) -> None:
    for name in ("noise of 0.2", "noise of 3", "all -32767"):
        _check(both, *_split(_values(n)[name]))


def test_no_gradient(both: Both) -> None:
    for n in (65, BLOCK + 15):
        _check(both, None, sum(_split(_values(n)["noise of 1"])))


@pytest.mark.parametrize("number", [1, -1, 100, -30000])
def test_one_live_value_anywhere(both: Both, number: int) -> None:
    for place in PLACES:
        v = np.zeros(BLOCK + 15)
        v[place] = number
        message, _ = _check(both, *_split(v))
        assert len(message) <= head_bytes(len(v)) + 4 + 8


def test_many_blocks(both: Both) -> None:
    """More blocks than a word has marks, of which some have no live value."""
    v = _values(70_000)["noise of 0.5"].copy()
    for block in (0, 3, 4, 31, 32, 34):
        v[BLOCK * block : BLOCK * (block + 1)] = 0
    _check(both, *_split(v))


@pytest.mark.parametrize("both", CUDA, indirect=True)
def test_more_blocks_than_one_warp_places(both: Both) -> None:
    v = np.zeros(1029 * BLOCK + 100, F32)
    for block in (0, 5, 700, 1023, 1024, 1027, 1029):
        v[BLOCK * block + 7 * block % 100 :: 301][:5] = block + 1
    _check(both, None, v * F32(STEP))


@pytest.mark.parametrize("n", [70, 2 * BLOCK + 15])
def test_step_is_doubled_until_the_message_fits(both: Both, n: int) -> None:
    least = least_bytes(n)
    for name in ("noise of 0.5", "noise of 40", "all -128", "clipped"):
        v = _split(_values(n)[name])
        message, _ = _check(both, *v)
        _, exact = _check(both, *v, room=len(message) + 4 * (n > BLOCK))
        assert exact >= STEP
        steps = [_check(both, *v, room=room)[1] for room in (least + n // 2, least + n // 8, least)]
        assert STEP <= steps[0] <= steps[1] <= steps[2]
        assert steps[2] >= 8 * STEP or name == "noise of 0.5"
    _check(both, None, sum(v), room=least)


def test_room_for_a_header_of_every_block(both: Both) -> None:
    """Of a message that fits only where there is room for headers that it does not have."""
    v = np.zeros(3 * BLOCK, F32)
    v[5000] = STEP
    message, _ = _check(both, None, v)
    assert len(message) < least_bytes(len(v))
    for more, doubled in ((1, 2), (2, 1)):  # bytes of the payload
        _, used = _check(both, None, v, room=least_bytes(len(v)) + more)
        assert used == doubled * STEP


@pytest.mark.parametrize("step", [2.0**-126, 1.5 * 2.0**-126, 2.0**-110, 2.0**100, 1.5 * 2.0**111])
def test_steps_of_every_magnitude(both: Both, step: float) -> None:
    for name in ("noise of 0.5", "noise of 40"):
        _check(both, *_split(_values(300)[name], step), step=step)
    _check(both, *_split(_values(300)["noise of 40"], step), step=step, room=least_bytes(300) + 40)


@pytest.mark.parametrize("step", [1e-45, 1e-40, 2.0**-126, 3e38])
def test_any_step_is_decoded(both: Both, step: float) -> None:
    message, _ = _check(both, *_split(_values(300)["noise of 3"]))
    message[4:8] = np.array([step], F32).view(np.uint8)
    with np.errstate(over="ignore"):
        assert _decode_alike(both, message, 300) == len(message)


def test_zeros_of_both_signs(both: Both) -> None:
    plus = np.zeros(100, F32)
    for gradient in (plus, -plus, None):
        for residual in (plus, -plus):
            _check(both, gradient, residual)
    _check(both, plus - STEP, plus + STEP)  # they cancel


def test_values_that_are_not_finite(both: Both) -> None:
    v = _split(_values(300)["noise of 1"])[0]
    v[[5, 77, 78]] = np.nan, np.inf, -np.inf
    zeros, least = np.zeros(300, F32), least_bytes(300)
    message, lost = _encode_alike(both, v, zeros, most_bytes(300), STEP)
    assert not np.isfinite(lost[[5, 77, 78]]).any()
    assert _decode_alike(both, message, 300) == len(message)
    for gradient in (v, None):
        given = None if gradient is None else both.cupy.asarray(gradient)
        residual, payload = both.cupy.asarray(zeros + v), both.cupy.zeros(least, np.uint8)
        with pytest.raises(FloatingPointError, match="not finite"):
            both.kernels.encode_entropy(given, residual, payload, 2.0**100)
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="not finite"):
        reference.encode_entropy(None, v, np.zeros(least, np.uint8), 2.0**100)


def _decode_alike(both: Both, message: Any, n: int) -> int:
    """What the reference makes of a message: this body must make the same of it, or refuse it too,
    and may write what it likes into `out`, and nowhere else."""
    with np.errstate(all="ignore"):
        length = reference.decode_entropy(message, np.zeros(n, F32), False)
        for add in (False, True):
            if length != DAMAGED:
                both("decode_entropy", message, _out(n), add)
                continue
            (whole, part), (out_whole, out) = both.guard(message), both.guard(_out(n))
            assert both.kernels.decode_entropy(part, out, add) == DAMAGED
            assert both.is_guarded(out_whole)
            assert both.is_guarded(whole)
            assert (both.cupy.asnumpy(part) == message).all()
    return length


def _messages() -> list[tuple[int, Any]]:
    """Messages with blocks of all kinds: gaps, marks, raw, none; without sizes and with these."""
    kinds = {70: "all 32767", 300: "noise of 0.2", 301: "half are live", 1000: "noise of 1"}
    vectors = [_values(n)[name] for n, name in kinds.items()]
    several = _values(4 * BLOCK + 100)["noise of 0.5"].copy()
    several[:BLOCK] *= 1e4
    several[BLOCK : 2 * BLOCK] = 0
    messages = []
    for v in (*vectors, several):
        payload = np.zeros(most_bytes(len(v)), np.uint8)
        length = reference.encode_entropy(*_split(v), payload, STEP)
        messages.append((len(v), payload[:length]))
    return messages


def _damaged(message: Any, random: np.random.Generator) -> Any:
    """A message with some bits flipped, half of the time in its first bytes, or a wrong length."""
    message = message.copy()
    for _ in range(random.integers(1, 4)):
        end = len(message) if random.random() < 0.5 else min(len(message), 24)
        message[random.integers(end)] ^= 1 << random.integers(8)
    kind = random.random()
    if kind < 0.1:
        return message[: random.integers(len(message))]
    if kind < 0.2:
        return np.concatenate([message, random.integers(0, 256, 20, np.uint8)])
    if kind < 0.3:  # the length is that of what is there
        shorter = message[: random.integers(8, len(message))]
        shorter[:4] = np.array([len(shorter)], "<u4").view(np.uint8)
        return shorter
    return message


def test_damaged_messages(both: Both) -> None:
    random, refused = np.random.default_rng(0), 0
    for n, message in _messages():
        for _ in range(60):
            refused += _decode_alike(both, _damaged(message, random), n) == DAMAGED
    assert 150 < refused < 290


def test_messages_of_the_wrong_length(both: Both) -> None:
    for n, message in _messages():
        for end in (*range(13), len(message) - 1):
            assert _decode_alike(both, message[:end], n) == DAMAGED
        longer = np.concatenate([message, np.zeros(9, np.uint8)])
        assert _decode_alike(both, longer, n) == len(message)
        for wrong in (0, 7, 8, len(message) - 1, len(message) + 1, 2**31, 2**32 - 1):
            longer[:4] = np.array([wrong], "<u4").view(np.uint8)
            assert _decode_alike(both, longer, n) == DAMAGED


@pytest.mark.parametrize("step", [0, -0.0, -1, np.inf, -np.inf, np.nan])
def test_steps_that_are_refused(both: Both, step: float) -> None:
    n, message = _messages()[1]
    message[4:8] = np.array([step], F32).view(np.uint8)
    assert _decode_alike(both, message, n) == DAMAGED


def test_marks_behind_the_last_block(both: Both) -> None:
    n, message = _messages()[-1]
    for block in (5, 31):
        marked = message.copy()
        marked[8:12].view(np.uint32)[0] |= np.uint32(1) << np.uint32(block)
        assert _decode_alike(both, marked, n) == DAMAGED


def _one_block(header: int, payload: Any) -> Any:
    """A message of one block."""
    head = np.array([16 + len(payload), 0, 1, header], "<u4")
    head[1:2] = np.array([STEP], F32).view(np.uint32)
    return np.concatenate([head.view(np.uint8), payload])


@pytest.mark.parametrize("fill", ["zeros", "ones", "random"])
def test_headers_of_every_kind(both: Both, fill: str) -> None:
    random, read = np.random.default_rng(3), 0
    for low, size_low in itertools.product(range(16), range(32)):
        n = int(random.choice([7, 32, 70]))
        z, nbytes = int(random.integers(1, n + 2)), int(random.integers(n // 8 + 1, 4 * n))
        payload = random.integers(0, 256, nbytes, np.uint8)
        payload = {"zeros": payload & 0, "ones": payload | 255, "random": payload}[fill]
        if low == 0:  # as many live values as the header says
            bits = np.unpackbits(payload, bitorder="little")
            bits[:n] = np.arange(n) < z
            payload = np.packbits(bits, bitorder="little")
        header = z - 1 | nbytes << 11 | low << 23 | size_low << 27
        read += _decode_alike(both, _one_block(header, payload), n) != DAMAGED
    assert read or fill == "ones"


def test_raw_headers_have_no_other_bits(both: Both) -> None:
    payload = np.arange(14, dtype=np.uint8)
    assert _decode_alike(both, _one_block(15 << 23, payload), 7) == 30
    for bit in (0, 11, 22, 27, 31):
        header = 15 << 23 | 1 << bit
        assert _decode_alike(both, _one_block(header, payload), 7) == DAMAGED


@pytest.mark.parametrize(("more", "read"), [(0, True), (1, False)])
def test_sizes_beyond_the_largest(both: Both, more: int, read: bool) -> None:
    """The highest sizes that 14 low planes can name."""
    size = LARGEST - 1 + more
    planes = [size >> j & 1 for j in range(14)] + [1, 0]
    payload = np.packbits([0, 0, 1, 0, 0, 0, 0, 1, *planes], bitorder="little")
    header = len(payload) << 11 | 14 << 27
    assert (_decode_alike(both, _one_block(header, payload), 7) != DAMAGED) == read


def test_random_bytes(both: Both) -> None:
    random = np.random.default_rng(4)
    for _ in range(60):
        payload = random.integers(0, 256, random.integers(1, 300), np.uint8)
        if random.random() < 0.5:
            payload &= random.integers(0, 256, len(payload), np.uint8)  # fewer ones
        z, low = random.integers(1, 60), random.integers(1, 12)
        header = int(z - 1 | len(payload) << 11 | low << 23 | random.choice([0, 1, 3, 15]) << 27)
        _decode_alike(both, _one_block(header, payload), 2000)
        _decode_alike(both, payload, 100)


class AtTheEnd:
    """Places arrays before memory that no process may read."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def __call__(self, array: Any, alignment: int) -> Any:
        """A copy that ends, but for what its alignment takes, where reading ends the process."""
        pages = mmap.mmap(-1, (-(-array.nbytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE)
        self._kept.append(pages)
        protect = CDLL(None).mprotect
        protect.argtypes = [c_void_p, c_size_t, c_int]
        end = len(pages) - mmap.PAGESIZE
        assert protect(addressof(c_char.from_buffer(pages, end)), mmap.PAGESIZE, 0) == 0
        begin = (end - array.nbytes) // alignment * alignment
        placed = np.frombuffer(pages, np.uint8, array.nbytes, begin).view(array.dtype)
        placed[:] = array
        return placed


@pytest.mark.parametrize("body", ["numba", "emulation"])
def test_nothing_is_read_behind_an_array(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that reads on ends the process: the test says no more than that."""
    both, place = both_of(body, monkeypatch), AtTheEnd()
    alignment = 1 if body == "numba" else 4  # of payloads
    random = np.random.default_rng(5)
    for n, message in _messages():
        gradient, residual = (place(x, 4) for x in _split(_values(n)["noise of 3"]))
        for room in (most_bytes(n), least_bytes(n) + n // 4, least_bytes(n)):
            payload = place(np.zeros(room, np.uint8), alignment)
            assert both.kernels.encode_entropy(gradient, residual, payload, STEP) <= room
        out = place(_out(n), 4)
        messages = [message, *(_damaged(message, random) for _ in range(12))]
        for header in (0x7FFFFF, 0x7FF800, 15 << 23, 2**32 - 1):  # all that follow are moved
            messages.append(message.copy())
            first = head_bytes(n)
            messages[-1][first : first + 4] = np.array([header], "<u4").view(np.uint8)
        for number, damaged in enumerate(messages):
            length = both.kernels.decode_entropy(place(damaged, alignment), out, number % 2 == 1)
            assert number or length == len(message)


_runs = st.lists(
    st.tuples(
        st.integers(0, 40) | st.integers(0, 3000),
        st.integers(-2, 2) | st.integers(-LARGEST - 1, LARGEST + 1),
        st.integers(1, 3) | st.integers(1, 3000),
    ),
    max_size=6,
)


@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(_runs, st.floats(0, 1))
def test_runs_of_values(runs: list[tuple[int, int, int]], room: float) -> None:
    """Some zeros, then some equal values, and so on."""
    v = np.concatenate([np.zeros(0), *(np.repeat([0, k], [a, b]) for a, k, b in runs)])
    least, most = least_bytes(len(v)), most_bytes(len(v))
    _check(Both(cpu, EMULATED), *_split(v), room=int(least + room * (most - least)))


def test_steps_of_processors_with_bmi2() -> None:
    """Numba's body packs bits by an instruction where there is one."""
    packs = njit(types.uint64(types.uint64, types.uint64))(lambda x, y: words.pack_bits(x, y))
    assert packs(0b1011, 0b1110) == 0b101
    has = words._has(cpu_target.target_context, "bmi2")
    if not {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & set(os.environ):
        assert has == llvmlite.binding.get_host_cpu_features().get("bmi2", False)
    (code,) = packs.inspect_asm().values()
    assert ("pext" in code) == has


def _compare_some() -> None:
    """In a process for another processor."""
    assert not words._has(cpu_target.target_context, "bmi2")
    both = Both(cpu, EMULATED)
    for name, v in _values(BLOCK + 15).items():
        _check(both, *_split(v))
        _check(both, *_split(v), room=least_bytes(len(v)) + len(v) // 4)
        assert name
    random = np.random.default_rng(6)
    for n, message in _messages():
        for _ in range(20):
            _decode_alike(both, _damaged(message, random), n)


@pytest.mark.skipif(sys.maxsize < 2**32, reason="of 64-bit processors")
def test_processors_without_bmi2(tmp_path: Path) -> None:
    cpu_of_2003 = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
    environment = {**os.environ, **cpu_of_2003, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", "import test_entropy; test_entropy._compare_some()"]
    subprocess.run(command, cwd=Path(__file__).parent, env=environment, check=True)
