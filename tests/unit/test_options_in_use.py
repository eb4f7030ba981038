"""What is asked for has an effect, or is refused."""

from __future__ import annotations

import re

import pytest

from parallel_sgd import DataParallelASGD, DataParallelSGD, DiLoCo, ModelAveragingSGD, UserError

ONE, HALF, FEW = "gradient_bits=1", "gradient_bits=16", "gradient_bits of less than 32"
CODED = "gradient_bits of 1 to 8"


@pytest.mark.parametrize("kind", [DataParallelSGD, DataParallelASGD, ModelAveragingSGD])
@pytest.mark.parametrize(
    ("options", "bits", "needs"),
    [
        ({"threshold": "mean"}, (32, 2, 16), ONE),
        ({"half_format": "bfloat16"}, (32, 1, 8), HALF),
        ({"error_feedback": False}, (32,), FEW),
    ],
    ids=str,
)
def test_options_of_codecs_that_are_not_used(kind, options, bits, needs):
    ((name, value),) = options.items()
    line = re.escape(f"{name}={value!r} has no effect without {needs}")
    for each in bits:
        with pytest.raises(UserError, match=f"^{line}$"):
            kind(gradient_bits=each, **options)
    used = {ONE: 1, HALF: 16, FEW: 4}[needs]
    assert getattr(kind(gradient_bits=used, **options), name) == value


@pytest.mark.parametrize("kind", [DataParallelSGD, DiLoCo])
def test_bits_that_may_come_count(kind):
    """Also those that a measurement would have to choose."""
    for bits in ("auto", {0: 32, 9: 16, 99: 1}):
        kind(gradient_bits=bits, threshold="mean", half_format="bfloat16", error_feedback=False)
    with pytest.raises(UserError, match=r"^half_format='bfloat16' has no effect without"):
        kind(gradient_bits={0: 32, 9: 1}, half_format="bfloat16")
    with pytest.raises(UserError, match=r"^error_feedback=False has no effect without"):
        kind(gradient_bits={0: 32, 9: 32}, error_feedback=False)


def test_blocks_cut_buckets_but_not_pushes():
    assert DataParallelSGD(block_size=64).block_size == 64
    for bits in (16, 32):
        with pytest.raises(UserError, match=f"^block_size=64 has no effect without {CODED}$"):
            DataParallelASGD(block_size=64, gradient_bits=bits)
    assert DataParallelASGD(block_size=64, gradient_bits=8).block_size == 64
