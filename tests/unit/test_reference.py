"""What quantization promises, checked on the reference in float64: the oracle's own oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kernel_cases import CASES, Case

from parallel_sgd.kernels import Blocks, cut, payload_offsets, reference

repeatable = settings(deadline=None, derandomize=True, database=None, max_examples=60)
ROUNDING = 2.0**-24  # of one float32 operation, relative to its result
SMALLEST = 2.0**-149  # the spacing of denormals


@dataclass(frozen=True)
class Format:
    name: str
    bits: int
    option: bool = False  # the threshold of 1 bit is the mean; 16 bits are a bfloat16

    def __call__(self, blocks, gradient, residual):
        """Returns q, the residual and the payload, with all arrays of the caller's left alone."""
        r, q = residual.copy(), np.full_like(gradient, np.nan)
        nbytes = 2 * len(q) if self.bits == 16 else blocks.bytes.stop - blocks.bytes.start
        payload = np.full(nbytes, 0xA5, np.uint8)
        if self.bits == 16:
            reference.encode_half(gradient, r, payload, self.option)
            reference.decode_half(payload, q, False, self.option)
        elif self.bits == 1:
            reference.encode_1bit(blocks, gradient, r, payload, self.option)
            reference.decode_1bit(blocks, payload, q, False)
        else:
            reference.encode_levels(self.bits, blocks, gradient, r, payload)
            reference.decode_levels(self.bits, blocks, payload, q, False)
        return q, r, payload

    def of(self, v, block_size=1024):
        """q and the residual of one parameter of values v."""
        v = np.asarray(v, np.float32)
        return self(self.blocks(cut([len(v)], block_size)), v, np.full_like(v, -0.0))[:2]

    def blocks(self, starts):
        return Blocks(starts, payload_offsets(starts, min(self.bits, 8)))

    def of_case(self, case):
        return case.blocks(min(self.bits, 8))

    def __str__(self):
        return self.name


ONE_BIT, ONE_BIT_MEAN = Format("1 bit", 1), Format("1 bit, mean", 1, True)
LEVELS = [Format(f"{bits} bits", bits) for bits in (4, 8)]
HALVES = [Format("float16", 16), Format("bfloat16", 16, True)]
FORMATS = [ONE_BIT, ONE_BIT_MEAN, *LEVELS, *HALVES]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def each_block(fmt: Format, case: Case):
    """(v in float64, q, residual, whether it is raw) of every block of a case."""
    blocks = fmt.of_case(case)
    q, r, _ = fmt(blocks, case.gradient, case.residual)
    v = (case.gradient + case.residual).astype(np.float64)
    starts = blocks.starts - blocks.starts[0]
    for i in range(len(blocks)):
        part = slice(starts[i], starts[i + 1])
        length = part.stop - part.start
        raw = fmt.bits < 16 and np.diff(blocks.offsets)[i] == 4 * length
        yield v[part], q[part].astype(np.float64), r[part].astype(np.float64), raw


@every_format
@every_case
def test_nothing_is_lost_between_message_and_residual(fmt, case):
    """g + r == q + r' but for the rounding of g + r and of v - q."""
    blocks = fmt.of_case(case)
    q, r, _ = fmt(blocks, case.gradient, case.residual)
    assert np.isfinite(q).all()
    assert np.isfinite(r).all()
    before = case.gradient.astype(np.float64) + case.residual
    after = q.astype(np.float64) + r
    bound = ROUNDING * (np.abs(before) + np.abs(r)) * 1.001 + SMALLEST
    assert (np.abs(after - before) <= bound).all()


@every_case
def test_one_bit_levels_are_the_means_of_the_two_classes(case):
    for v, q, _, raw in each_block(ONE_BIT, case):
        if not raw:
            for members in (v >= 0, v < 0):
                mean = v[members].mean() if members.any() else 0
                assert np.allclose(q[members], mean, rtol=2e-5, atol=1e-44)


@every_case
def test_one_bit_about_the_mean_sends_mean_and_spread(case):
    for v, q, _, raw in each_block(ONE_BIT_MEAN, case):
        if not raw:
            mean = v.mean()
            spread = np.abs(v - mean).mean()
            close = np.abs(v - mean) < 1e-5 * np.abs(v).mean()  # these may fall on either side
            expected = np.where(v >= mean, mean + spread, mean - spread)
            wrong = np.abs(q - expected) > 2e-5 * np.abs(v).mean() + 1e-44
            assert not (wrong & ~close).any()


@pytest.mark.parametrize("fmt", LEVELS, ids=str)
@every_case
def test_levels_are_the_nearest_multiples_of_one_step(fmt, case):
    largest = 2 ** (fmt.bits - 1) - 1
    for v, q, r, raw in each_block(fmt, case):
        if raw:
            continue
        step = np.abs(v).max() / largest
        if step < 2e-37:  # sent as zeros or nearly so, and kept
            continue
        code = q / step
        assert (np.abs(code - np.round(code)) < 1e-3).all()
        assert np.abs(code).max(initial=0) < largest + 1e-3
        assert (np.abs(r) <= step * 0.5001).all()


@pytest.mark.parametrize("fmt", LEVELS, ids=str)
@pytest.mark.parametrize("nonzeros", [1, 8, 64, 1024])
def test_levels_keep_up_with_a_constant_gradient(fmt, nonzeros):
    """|r'| <= step / 2 <= (max|g| + max|r|) / (2 largest), whose fixed point is the bound."""
    gradient = np.zeros(1024, np.float32)
    gradient[:nonzeros] = np.random.default_rng(nonzeros).standard_normal(nonzeros)
    bound = np.abs(gradient).max() / (2**fmt.bits - 3)
    blocks, r = fmt.blocks(cut([1024], 1024)), np.zeros_like(gradient)
    for _ in range(50):
        _, r, _ = fmt(blocks, gradient, r)
        assert np.abs(r).max() <= 1.0001 * bound


@pytest.mark.parametrize("fmt", [*LEVELS, *HALVES], ids=str)
@every_case
def test_zero_stays_exactly_zero(fmt, case):
    for v, q, r, _ in each_block(fmt, case):
        assert (q[v == 0] == 0).all()
        assert (r[v == 0] == 0).all()


@every_format
@every_case
def test_a_raw_block_is_exact(fmt, case):
    for v, q, r, raw in each_block(fmt, case):
        if raw:
            assert np.array_equal(q, v)
            assert not r.any()


@every_format
@pytest.mark.parametrize("value", [0.1, -3e-3, 1e4])
def test_a_block_of_one_value_is_nearly_exact(fmt, value):
    q, r = fmt.of([value] * 1000)
    tolerance = {"float16": 2**-11, "bfloat16": 2**-8}.get(fmt.name, 1e-5)
    assert np.abs(q - np.float32(value)).max() <= tolerance * abs(value)
    assert np.abs(r).max() <= tolerance * abs(value)


def test_the_encoder_keeps_a_power_of_two_scale():
    """Nothing depends on the scale of a gradient, but for the ends of float16's range."""
    v = np.random.default_rng(5).standard_normal(3000).astype(np.float32)
    for fmt in (f for f in FORMATS if f.name != "float16"):
        q, r = fmt.of(v)
        q4, r4 = fmt.of(4 * v)
        assert np.array_equal(q4, 4 * q)
        assert np.array_equal(r4, 4 * r)


def test_float16_keeps_what_is_beyond_its_largest():
    q, r = HALVES[0].of([1e6, -1e6, 65504, 65519, 65536])
    assert q.tolist() == [65504, -65504, 65504, 65504, 65504]
    assert r.tolist() == [1e6 - 65504, 65504 - 1e6, 0, 15, 32]


@repeatable
@given(arrays(np.uint32, st.integers(1, 50), elements=st.integers(0, 0x7F00_0000)), st.booleans())
def test_bfloat16_is_the_nearest_and_of_two_the_even(words, negative):
    v = words.view(np.float32) * np.float32(-1 if negative else 1)
    q, _ = HALVES[1].of(v)
    below = (words & 0xFFFF_0000).view(np.float32).astype(np.float64)  # towards zero
    above = ((words & 0xFFFF_0000) + 0x1_0000).view(np.float32).astype(np.float64)
    magnitude, chosen = np.abs(v).astype(np.float64), np.abs(q).astype(np.float64)
    even = np.where((words >> 16) & 1, above, below)
    middle = (below + above) / 2
    nearest = np.where(magnitude < middle, below, np.where(magnitude > middle, above, even))
    assert np.array_equal(chosen, nearest)
    assert np.array_equal(np.signbit(q), np.signbit(v))


@repeatable
@given(st.integers(0, 3000), st.integers(0, 10))
def test_lane_sum_is_a_sum(n, seed):
    values = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    exact = values.astype(np.float64).sum()
    assert abs(reference.lane_sum(values) - exact) <= 1e-6 * np.abs(values).sum(dtype=float)


def test_largest_magnitude():
    assert reference.largest_magnitude(np.zeros(0, np.float32)) == 0
    assert reference.largest_magnitude(np.float32([1, -3, 2])) == 3
    assert reference.largest_magnitude(np.float32([1, -np.inf])) == np.inf
    assert np.isnan(reference.largest_magnitude(np.array([np.inf, np.nan, 1])))
