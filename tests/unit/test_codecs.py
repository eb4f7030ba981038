"""Codecs: options in, the right kernels and blocks out, and one form for files."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from parallel_sgd import Parameters, UserError
from parallel_sgd.compression import (
    Allowance,
    EntropyCoded,
    FullPrecision,
    HalfPrecision,
    Mixed,
    OneBit,
    UniformLevels,
    VariableMessage,
    codec_for,
    codec_from_dict,
    problem_with,
    registered_bits,
)
from parallel_sgd.patterns import Patterns

CODECS = [
    OneBit(),
    OneBit(block_size=100, threshold="mean"),
    *(EntropyCoded(bits=bits, block_size=size) for bits in (0.3, 2) for size in (1024, 70)),
    *(UniformLevels(bits=bits, block_size=size) for bits in (4, 8) for size in (1024, 70)),
    HalfPrecision(),
    HalfPrecision(half_format="bfloat16", block_size=70),
    FullPrecision(),
]
POSSIBLE = "a number from 0.05 to 8, 16 or 32"
every_codec = pytest.mark.parametrize("codec", CODECS, ids=str)


@pytest.fixture
def parameters():
    p = Parameters({"W": np.zeros((50, 41), np.float32), "b": np.zeros(41, np.float32)})
    p.flat[:] = np.random.default_rng(0).standard_normal(p.flat.size)
    return p


@every_codec
def test_dict_and_back(codec):
    assert codec_from_dict(json.loads(json.dumps(codec.to_dict()))) == codec


def test_dict_names_the_codec_and_its_options():
    assert UniformLevels(bits=4, block_size=70).to_dict() == {
        "name": "UniformLevels",
        "bits": 4,
        "block_size": 70,
    }


def test_codecs_have_plain_values():
    codec = OneBit(block_size=np.int64(64), threshold=np.str_("mean"))
    assert repr(codec) == "OneBit(block_size=64, threshold='mean')"
    assert codec_from_dict(json.loads(json.dumps(codec.to_dict()))) == codec
    assert repr(codec_for(np.int32(4))) == "UniformLevels(bits=4, block_size=1024)"
    assert repr(HalfPrecision(half_format=np.str_("float16"))) == repr(HalfPrecision())


def test_codecs_are_values():
    assert OneBit() == codec_for(1, code="sign")
    assert [codec_for(bits) for bits in (1, np.float32(0.5))] == [
        EntropyCoded(bits=1),
        EntropyCoded(bits=0.5),
    ]
    assert len({OneBit(), OneBit(block_size=1024), OneBit(threshold="mean")}) == 2


@pytest.mark.parametrize("bits", registered_bits())
def test_codec_for_takes_every_option(bits):
    codec = codec_for(bits, block_size=64, threshold="mean", half_format="bfloat16")
    assert codec.bits == bits
    assert codec.block_size == 64
    assert getattr(codec, "threshold", "mean") == "mean"
    assert getattr(codec, "half_format", "bfloat16") == "bfloat16"


@every_codec
def test_encode_and_decode(codec, parameters):
    """A part of the blocks goes with the same part of the arrays, and the sum is kept."""
    g = parameters.flat
    blocks = codec.blocks(parameters)
    assert blocks.values == slice(0, g.size)
    r = (g[::-1] / 3).copy()
    before = g.astype(float) + r
    payload = np.empty(blocks.bytes.stop, np.uint8)
    q, total = np.full_like(g, np.nan), g.copy()
    middle = len(blocks) // 2
    for part in (blocks.part(middle, len(blocks)), blocks.part(0, middle)):
        message = payload[part.bytes]
        taken = codec.encode(part, g[part.values], r[part.values], message)
        assert codec.decode(part, message, q[part.values], add=False) == taken
        assert codec.decode(part, message, total[part.values], add=True) == taken
    assert np.abs(q.astype(float) + r - before).max() < 1e-6
    assert (r != 0).any() == (codec.bits < 32)
    assert np.array_equal(total, g + q)
    if codec.has_fixed_length:
        assert taken is None
        whole = g.copy()
        codec.decode(blocks, payload, whole, add=True)
        assert np.array_equal(whole, total)


fixed = pytest.mark.parametrize("codec", [c for c in CODECS if c.has_fixed_length], ids=str)


@fixed
def test_the_payload_has_the_promised_size(codec, parameters):
    blocks, n = codec.blocks(parameters), parameters.flat.size
    levels = 8 if isinstance(codec, OneBit) else 4 if codec.bits < 16 else 0
    packed = n * codec.bits / 8 + levels * len(blocks)
    assert packed <= blocks.bytes.stop <= packed + max(4, 4 * codec.bits) * len(blocks)
    assert blocks.bytes.stop <= 4 * n


@pytest.mark.parametrize("bits", [0.05, 0.1, 0.25, 0.3, 1, 2, 7.5])
@pytest.mark.parametrize("form", ["normal", "layers", "a constant", "one value"])
def test_a_message_of_variable_length_has_about_as_many_bits(bits, form):
    """Within 10 % and 32 bytes, whatever the scale of the values. Of equal values either all are
    live or none is."""
    codec, random = EntropyCoded(bits=bits), np.random.default_rng(3)
    parameters = Parameters({"W": np.zeros(99_500, np.float32), "b": np.zeros(500, np.float32)})
    n = parameters.flat.size
    values = {
        "normal": random.standard_normal(n),
        "layers": random.standard_normal(n) * np.repeat([1e-9, 1, 30, 1e-3], n // 4),
        "a constant": np.full(n, -1e-20),
        "one value": np.arange(n) == 77_777,
    }[form].astype(np.float32)
    blocks = codec.blocks(parameters)
    payload, residual = np.empty(blocks.bytes.stop, np.uint8), np.zeros_like(values)
    taken = codec.encode(blocks, values, residual, payload)
    assert taken % 4 == 0 and taken <= payload.size
    most = 1.1 * codec.encoded_bytes(n) + 32
    if form == "a constant":
        most = max(most, 2.1 / 8 * n)
    least = 0.9 * codec.encoded_bytes(n) if form in ("normal", "layers") else 0
    assert least <= taken <= most


@pytest.mark.parametrize("bits", [0.05, 2, 7.5])
@pytest.mark.parametrize("block_size", [1, 3, 1024])
def test_every_message_has_room(bits, block_size):
    """Also of few values, and of values that no step suits."""
    codec, random = EntropyCoded(bits=bits, block_size=block_size), np.random.default_rng(1)
    for n in range(1, 70):
        parameters = Parameters({"x": np.zeros(n, np.float32)})
        blocks = codec.blocks(parameters)
        message = VariableMessage(codec, blocks)
        g = (random.standard_normal(n) * 10 ** random.uniform(-9, 9, n)).astype(np.float32)
        residual, payload = np.zeros_like(g), np.empty(blocks.bytes.stop, np.uint8)
        allowances = [Allowance(codec, [(g, residual)])]
        sent = message.encode(g, residual, payload, lambda codec, one=allowances: one[0])
        q = np.empty_like(g)
        assert message.decode(sent, q, False) == len(sent) <= len(payload)
        assert np.allclose(q + residual, g, rtol=1e-6)


def test_mixed_blocks_are_aligned_and_can_be_encoded_one_by_one(parameters):
    """Also those of 16 bits, of odd lengths."""
    own = {"b": HalfPrecision(block_size=7), "W": UniformLevels(bits=4, block_size=7)}
    codec = Mixed(others=OneBit(block_size=7), own=Patterns(own))
    odd = Parameters({"a": np.zeros(20, np.float32), **parameters, "c": np.zeros(9, np.float32)})
    odd.flat[:] = np.random.default_rng(1).standard_normal(odd.flat.size)
    blocks = codec.blocks(odd)
    assert not (blocks.offsets % 4).any()
    assert [len(run.blocks) for run in blocks.runs] == [3, 293, 1, 1, 1, 1, 1, 1, 2]
    results = []
    one_by_one = [blocks.part(i, i + 1) for i in range(len(blocks))]
    for rubbish, parts in ((1, [blocks]), (2, one_by_one)):
        payload, residual = np.full(blocks.bytes.stop, rubbish, np.uint8), odd.flat / 3
        out = np.ones_like(residual)
        for part in parts:
            at, place = part.values, part.bytes
            codec.encode(part, odd.flat[at], residual[at], payload[place])
            codec.decode(part, payload[place], out[at], add=True)
        results.append(np.concatenate([payload, residual.view(np.uint8), out.view(np.uint8)]))
        assert np.abs(out - 1 + residual - odd.flat * (4 / 3)).max() < 1e-5
    assert np.array_equal(*results)


def test_the_largest_value_of_few_bits():
    x = np.array([0, -1e30], np.float32)
    assert problem_with(x, 16) is None
    x[1] = np.nextafter(x[1], np.float32(-np.inf))
    assert "is too large" in problem_with(x, 16)
    assert problem_with(x, 32) is None


def test_float64_travels_whole():
    p = Parameters({"W": np.arange(3000) / 7})
    blocks = FullPrecision().blocks(p)
    payload, residual = np.empty(blocks.bytes.stop, np.uint8), np.full(3000, 0.5)
    FullPrecision().encode(blocks, p.flat, residual, payload)
    q = np.empty(3000)
    FullPrecision().decode(blocks, payload, q, add=False)
    assert np.array_equal(q, p.flat + 0.5)
    assert not residual.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda bits=bits: codec_for(bits), f"gradient_bits={bits!r} must be {POSSIBLE}")
            for bits in (0, 0.049, -1, 8.001, 9, 33, "1", True, None, math.nan, math.inf)
        ),
        (lambda: UniformLevels(bits=2), "bits=2 must be 4 or 8"),
        (lambda: UniformLevels(bits=4.0), "bits=4.0 must be 4 or 8"),
        (lambda: EntropyCoded(bits=0.04), "bits=0.04 must be a finite number, at least 0.05.*"),
        (lambda: EntropyCoded(bits=8.5), "bits=8.5 must be a finite number, .* and at most 8.0"),
        (
            lambda: codec_for(1, code="sine"),
            "code='sine' must be one of 'auto', 'entropy', 'levels', 'sign', 'top-k'",
        ),
        (lambda: OneBit(threshold="median"), "threshold='median' must be 'zero' or 'mean'"),
        (lambda: OneBit(threshold=None), "threshold=None must be 'zero' or 'mean'"),
        (
            lambda: HalfPrecision(half_format="float8"),
            "half_format='float8' must be 'float16' or 'bfloat16'",
        ),
        (lambda: codec_from_dict({"name": "Zip"}), "codec name='Zip' must be one of .*OneBit, .*"),
        (lambda: codec_from_dict({}), "codec name=None must be one of .*OneBit, .*"),
    ],
)
def test_what_is_not_possible_is_refused(make, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        make()


@pytest.mark.parametrize("bits", registered_bits())
@pytest.mark.parametrize("block_size", [0, -1, 2**20 + 1, 1.5, "1024", None, True])
def test_block_sizes_that_are_refused(bits, block_size):
    with pytest.raises(
        UserError, match=f"^block_size={block_size!r} must be a whole number from 1"
    ):
        codec_for(bits, block_size=block_size)
