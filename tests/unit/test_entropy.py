"""The entropy code: its promises, and that each body has the bytes of the reference."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import numpy as np
import pytest
from entropy_cases import (
    F32,
    STEP,
    check,
    damage,
    decode_alike,
    encode_alike,
    good_messages,
    split,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bodies import CUDA, EMULATED, Both, both_of
from numba import njit, types
from numba.core.registry import cpu_target

from parallel_sgd.kernels import cpu, reference, words
from parallel_sgd.kernels.entropy_reference import (
    BLOCK,
    LARGEST,
    head_bytes,
    least_bytes,
    most_bytes,
)

LENGTHS = (0, 1, 2, 31, 32, 33, 63, 64, 65, 1000, 2047, 2048, 2049, 5000)
PLACES = (0, 1, 31, 32, 63, 64, 1000, 2046, 2047, 2048, 2062)


@pytest.fixture(params=["numba", *CUDA])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Both:
    """Each body of the kernels with its arrays."""
    return both_of(request.param, monkeypatch)


@pytest.mark.parametrize("name", values(1))
def test_every_kind(both: Both, name: str) -> None:
    for n in (70, BLOCK + 15):
        check(both, *split(values(n)[name]))


@pytest.mark.parametrize("n", LENGTHS)
def test_every_length(both: Both, n: int) -> None:
    for name in ("noise of 0.2", "noise of 3", "all -32767"):
        check(both, *split(values(n)[name]))


def test_no_gradient(both: Both) -> None:
    for n in (65, BLOCK + 15):
        check(both, None, sum(split(values(n)["noise of 1"])))


@pytest.mark.parametrize("n", [8, 9, 80, 2040, BLOCK])
def test_one_in_eight_values_is_live(both: Both, n: int) -> None:
    """And one more, and one fewer: where the code of places changes."""
    for z in (n // 8 - 1, n // 8, n // 8 + 1):
        for every in (1, 2, 7):
            v = np.zeros(n)
            v[: every * z : every] = 1
            check(both, *split(v))


@pytest.mark.parametrize("number", [1, -1, 100, -30000])
def test_one_live_value_anywhere(both: Both, number: int) -> None:
    for place in PLACES:
        v = np.zeros(BLOCK + 15)
        v[place] = number
        message, _ = check(both, *split(v))
        assert len(message) <= head_bytes(len(v)) + 4 + 8


def test_many_blocks(both: Both) -> None:
    """More blocks than a word has marks, of which some have no live value."""
    v = values(70_000)["noise of 0.5"].copy()
    for block in (0, 3, 4, 31, 32, 34):
        v[BLOCK * block : BLOCK * (block + 1)] = 0
    check(both, *split(v))


@pytest.mark.parametrize("both", CUDA, indirect=True)
def test_more_blocks_than_one_warp_places(both: Both) -> None:
    v = np.zeros(1029 * BLOCK + 100, F32)
    for block in (0, 5, 700, 1023, 1024, 1027, 1029):
        v[BLOCK * block + 7 * block % 100 :: 301][:5] = block + 1
    check(both, None, v * F32(STEP))


@pytest.mark.parametrize("n", [70, 2 * BLOCK + 15])
def test_step_is_doubled_until_the_message_fits(both: Both, n: int) -> None:
    least = least_bytes(n)
    for name in ("noise of 0.5", "noise of 40", "all -128", "clipped"):
        v = split(values(n)[name])
        message, _ = check(both, *v)
        _, exact = check(both, *v, room=len(message) + 4 * (n > BLOCK))
        assert exact >= STEP
        steps = [check(both, *v, room=room)[1] for room in (least + n // 2, least + n // 8, least)]
        assert STEP <= steps[0] <= steps[1] <= steps[2]
        assert steps[2] >= 8 * STEP or name == "noise of 0.5"
    check(both, None, sum(v), room=least)


def test_room_for_a_header_of_every_block(both: Both) -> None:
    """Of a message that fits only where there is room for headers that it does not have."""
    v = np.zeros(3 * BLOCK, F32)
    v[5000] = STEP
    message, _ = check(both, None, v)
    assert len(message) < least_bytes(len(v))
    for more, doubled in ((1, 2), (2, 1)):  # bytes of the payload
        _, used = check(both, None, v, room=least_bytes(len(v)) + more)
        assert used == doubled * STEP


@pytest.mark.parametrize("step", [2.0**-126, 1.5 * 2.0**-126, 2.0**-110, 2.0**100, 1.5 * 2.0**111])
def test_steps_of_every_magnitude(both: Both, step: float) -> None:
    for name in ("noise of 0.5", "noise of 40"):
        check(both, *split(values(300)[name], step), step=step)
    check(both, *split(values(300)["noise of 40"], step), step=step, room=least_bytes(300) + 40)


@pytest.mark.parametrize("step", [0.0, 0.99 * 2.0**-126, -1.0, np.nan])
def test_steps_that_are_too_small(both: Both, step: float) -> None:
    v, payload = both.cupy.zeros(300, np.float32), both.cupy.zeros(most_bytes(300), np.uint8)
    for kernels in (both.kernels, reference):
        with pytest.raises(ValueError, match="must be at least"):
            kernels.encode_entropy(None, v, payload, step)


def test_a_payload_without_room_for_the_head(both: Both) -> None:
    v, payload = both.cupy.zeros(70_000, np.float32), both.cupy.zeros(8, np.uint8)
    for kernels in (both.kernels, reference):
        with pytest.raises(ValueError, match="must have room"):
            kernels.encode_entropy(None, v, payload, 1.0)


@pytest.mark.parametrize("step", [1e-45, 1e-40, 2.0**-126, 3e38])
def test_any_step_is_decoded(both: Both, step: float) -> None:
    message, _ = check(both, *split(values(300)["noise of 3"]))
    message[4:8] = np.array([step], F32).view(np.uint8)
    with np.errstate(over="ignore"):
        assert decode_alike(both, message, 300) == len(message)


def test_zeros_of_both_signs(both: Both) -> None:
    plus = np.zeros(100, F32)
    for gradient in (plus, -plus, None):
        for residual in (plus, -plus):
            check(both, gradient, residual)
    check(both, plus - STEP, plus + STEP)  # they cancel


def test_values_that_are_not_finite(both: Both) -> None:
    v = split(values(300)["noise of 1"])[0]
    v[[5, 77, 78]] = np.nan, np.inf, -np.inf
    zeros, least = np.zeros(300, F32), least_bytes(300)
    message, lost = encode_alike(both, v, zeros, most_bytes(300), STEP)
    assert not np.isfinite(lost[[5, 77, 78]]).any()
    assert decode_alike(both, message, 300) == len(message)
    for gradient in (v, None):
        given = None if gradient is None else both.cupy.asarray(gradient)
        residual, payload = both.cupy.asarray(zeros + v), both.cupy.zeros(least, np.uint8)
        with pytest.raises(FloatingPointError, match="not finite"):
            both.kernels.encode_entropy(given, residual, payload, 2.0**100)
    with np.errstate(all="ignore"), pytest.raises(FloatingPointError, match="not finite"):
        reference.encode_entropy(None, v, np.zeros(least, np.uint8), 2.0**100)


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
    check(Both(cpu, EMULATED), *split(v), room=int(least + room * (most - least)))


def test_an_instruction_packs_bits_where_there_is_one() -> None:
    packs = njit(types.uint64(types.uint64, types.uint64))(lambda x, y: words.pack_bits(x, y))
    assert packs(0b1011, 0b1110) == 0b101
    has = words.has_feature(cpu_target.target_context, "bmi2")
    if not {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"} & set(os.environ):
        assert has == llvmlite.binding.get_host_cpu_features().get("bmi2", False)
    (code,) = packs.inspect_asm().values()
    assert ("pext" in code) == has


def _compare_some() -> None:
    """In a process for another processor."""
    has_bmi2 = os.environ["NUMBA_CPU_NAME"] == "haswell"
    assert words.has_feature(cpu_target.target_context, "bmi2") == has_bmi2
    assert not words.has_feature(cpu_target.target_context, "avx512f")
    both = Both(cpu, EMULATED)
    for v in values(BLOCK + 15).values():
        check(both, *split(v))
        check(both, *split(v), room=least_bytes(len(v)) + len(v) // 4)
    random = np.random.default_rng(6)
    for n, message in good_messages():
        for _ in range(20):
            decode_alike(both, damage(message, random), n)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="other processors than x86 have neither AVX2 nor BMI2, so all tests here run the loops",
)
@pytest.mark.parametrize("cpu_name", ["x86-64", "haswell"])
def test_processors_without_bmi2_or_avx512(cpu_name: str) -> None:
    """Their machine code is kept beside this processor's: Numba tells them apart."""
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu_name, "NUMBA_CPU_FEATURES": ""}
    command = [sys.executable, "-c", "import test_entropy; test_entropy._compare_some()"]
    subprocess.run(command, cwd=Path(__file__).parent, env=environment, check=True)
