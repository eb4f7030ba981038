"""The loops of the Numba kernels inside one block, in the vector code of `emitter`.

Encoding a block takes two passes. The first leaves v = g + r in r and returns the sums or the
maximum for the levels. The second packs, and leaves v - q in r. The second pass finds its data in
the cache and leaves memory idle, so it also fetches the next block's gradient.

Every function here works on one block: arrays with the index of the block's first value (`at`), or
of its first packed byte (`byte`), and its number of values `n`. The last n % 32 values pass through
a stack buffer padded with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .blocks import GROUP
from .emitter import (
    F32X32,
    FLOAT,
    I8,
    I16,
    I32,
    I32X32,
    I64,
    Emitter,
    How,
    Value,
    every_lane,
    vector_function,
)
from .memory import LINE
from .reference import LARGEST_HALF, ROUNDING


@intrinsic
def float_to_word(context: Any, value: Any) -> Any:
    """Return the bits of a float32, as uint32."""
    return types.uint32(types.float32), lambda c, b, s, a: b.bitcast(a[0], I32)


@intrinsic
def word_to_float(context: Any, value: Any) -> Any:
    """Return the float32 with the bits of a uint32."""
    return types.float32(types.uint32), lambda c, b, s, a: b.bitcast(a[0], FLOAT)


@vector_function("x", "int", returns=types.boolean)
def begins_a_line(e: Emitter, x: Value, at: Value) -> Value:
    """Return True if a value lies at the beginning of a cache line."""
    address = e.b.ptrtoint(e.place(x, at, FLOAT), I64)
    return e.b.icmp_unsigned("==", e.b.urem(address, I64(LINE)), I64(0))


@vector_function()
def finish_stores(e: Emitter) -> None:
    """Make streaming stores visible to other threads."""
    e.b.fence("seq_cst")


@vector_function("x", "int", "int")
def fill_zeros(e: Emitter, x: Value, at: Value, n: Value) -> None:
    """Set x = 0."""
    zeros = F32X32(None)
    e.groups(n, lambda first, tail: e.store(zeros, x, e.b.add(at, first), tail))


_WORDS = {types.float32: types.uint32, types.float64: types.uint64}
_REALS = {word: real for real, word in _WORDS.items()}


@intrinsic
def magnitude_to_word(context: Any, value: Any) -> Any:
    """Return the bits of a float32 or float64 without the sign.

    The order of these words is that of magnitudes; infinity is above all numbers, and NaN above
    infinity.
    """
    word = _WORDS[value]

    def emit(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.IntType(value.bitwidth)
        return b.and_(b.bitcast(arguments[0], kind), kind(2 ** (value.bitwidth - 1) - 1))

    return word(value), emit


@intrinsic
def word_to_magnitude(context: Any, word: Any) -> Any:
    """Return the inverse of `magnitude_to_word`."""
    real = _REALS[word]
    return real(word), lambda c, b, s, a: b.bitcast(a[0], c.get_value_type(real))


@vector_function("payload", "int", returns=types.float32)
def get_level(e: Emitter, payload: Value, byte: Value) -> Value:
    return e.vector_load(e.place(payload, byte, I8), FLOAT, 4)


@vector_function("payload", "int", "float")
def set_level(e: Emitter, payload: Value, byte: Value, level: Value) -> None:
    e.vector_store(level, e.place(payload, byte, I8), 4)


@vector_function("g", "r", "payload", "int", "int", "int")
def encode_raw(
    e: Emitter, g: Value, r: Value, payload: Value, at: Value, byte: Value, n: Value
) -> None:
    """Set payload = v;  r = 0."""
    e.keep_apart()
    place, zeros = e.place(payload, byte, I8), F32X32(None)

    def body(first: Value, tail: Value | None) -> None:
        index = e.b.add(at, first)
        e.store(e.b.fadd(e.load(g, index, tail), e.load(r, index, tail)), place, first, tail)
        e.store(zeros, r, index, tail)

    e.groups(n, body)


def _decode_raw(how: How) -> Any:
    @vector_function("payload", "out", "int", "int", "int")
    def decode_raw(
        e: Emitter, payload: Value, out: Value, byte: Value, at: Value, n: Value
    ) -> None:
        e.keep_apart()
        place = e.place(payload, byte, I8)

        def body(first: Value, tail: Value | None) -> None:
            e.put(e.load(place, first, tail), out, e.b.add(at, first), tail, how)

        e.groups(n, body)

    return decode_raw


@vector_function(
    "g", "r", "payload", "int", "int", "int",
    returns=types.Tuple([types.float32, types.float32, types.int64]),
)  # fmt: skip
def classify(
    e: Emitter, g: Value, r: Value, payload: Value, at: Value, byte: Value, n: Value
) -> list[Value]:
    """Set r = v and write bit = v >= 0.

    Returns (sum of v where bit, sum of v elsewhere, number of ones).
    """
    b = e.b
    high, low, zeros = e.accumulator(), e.accumulator(), F32X32(None)
    count = cgutils.alloca_once_value(b, I64(0))

    def body(first: Value, tail: Value | None) -> None:
        v = e.correct(g, r, b.add(at, first), tail)
        bit = b.and_(b.fcmp_ordered(">=", v, zeros), e.inside(tail))
        e.add_to(high, v, where=bit)
        e.add_to(low, v, where=b.not_(bit))
        word = b.bitcast(bit, I32)
        e.vector_store(word, e.place(payload, b.add(byte, b.udiv(first, I64(8))), I8), 4)
        b.store(b.add(b.load(count, typ=I64), b.zext(b.ctpop(word), I64)), count)

    e.groups(n, body)
    return [e.total(high), e.total(low), b.load(count, typ=I64)]


@vector_function("g", "r", "int", "int", returns=types.float32)
def plain_sum(e: Emitter, g: Value, r: Value, at: Value, n: Value) -> Value:
    """Set r = v. Return the sum of v."""
    total = e.accumulator()
    e.groups(n, lambda first, tail: e.add_to(total, e.correct(g, r, e.b.add(at, first), tail)))
    return e.total(total)


@vector_function("r", "payload", "int", "int", "int", "float", returns=types.float32)
def classify_around(
    e: Emitter, r: Value, payload: Value, at: Value, byte: Value, n: Value, centre: Value
) -> Value:
    """Write bit = v >= centre, with v from r. Return the sum of |v - centre|."""
    b = e.b
    total, centres = e.accumulator(), e.splat(centre)

    def body(first: Value, tail: Value | None) -> None:
        v = e.load(r, b.add(at, first), tail)
        word = b.bitcast(b.and_(b.fcmp_ordered(">=", v, centres), e.inside(tail)), I32)
        e.vector_store(word, e.place(payload, b.add(byte, b.udiv(first, I64(8))), I8), 4)
        e.add_to(total, e.absolute(b.fsub(v, centres)), where=e.inside(tail))

    e.groups(n, body)
    return e.total(total)


@vector_function("g", "r", "int", "int", returns=types.float32)
def largest(e: Emitter, g: Value, r: Value, at: Value, n: Value) -> Value:
    """Set r = v. Return max |v|, compared as integers, which order non-negative floats alike."""
    b = e.b
    place = cgutils.alloca_once_value(b, I32X32(None))

    def body(first: Value, tail: Value | None) -> None:
        v = e.words(e.absolute(e.correct(g, r, b.add(at, first), tail)))
        b.store(e.larger(v, b.load(place, typ=I32X32)), place)

    e.groups(n, body)
    return b.bitcast(e.largest_lane(b.load(place, typ=I32X32)), FLOAT)


@vector_function("g", "r", "payload", "int", "int", "int", "float", "float")
def subtract_levels(
    e: Emitter,
    g: Value,
    r: Value,
    payload: Value,
    at: Value,
    byte: Value,
    n: Value,
    low: Value,
    high: Value,
) -> None:
    """Set r = v - (high if bit else low), with v from r and the bits from the payload."""
    b = e.b
    lows, highs = e.splat(low), e.splat(high)

    def body(first: Value, tail: Value | None) -> None:
        index = b.add(at, first)
        q = b.select(e.bits(payload, b.add(byte, b.udiv(first, I64(8)))), highs, lows)
        e.store(b.fsub(e.load(r, index, tail), q), r, index, tail)
        e.fetch(g, b.add(index, n))

    e.groups(n, body)


def _unpack_bits(how: How) -> Any:
    @vector_function("payload", "out", "int", "int", "int", "float", "float")
    def unpack_bits(
        e: Emitter,
        payload: Value,
        out: Value,
        byte: Value,
        at: Value,
        n: Value,
        low: Value,
        high: Value,
    ) -> None:
        b = e.b
        lows, highs = e.splat(low), e.splat(high)

        def body(first: Value, tail: Value | None) -> None:
            bit = e.bits(payload, b.add(byte, b.udiv(first, I64(8))))
            e.put(b.select(bit, highs, lows), out, b.add(at, first), tail, how)

        e.groups(n, body)

    return unpack_bits


def _pack_codes(bits: int) -> Any:
    width = GROUP * bits // 8
    places = [bits * (lane // width) for lane in range(GROUP)]  # the shift of a lane's code

    @vector_function("g", "r", "payload", "int", "int", "int", "float", "float")
    def pack_codes(
        e: Emitter,
        g: Value,
        r: Value,
        payload: Value,
        at: Value,
        byte: Value,
        n: Value,
        inverse: Value,
        step: Value,
    ) -> None:
        """Write the codes of v from r, and set r = v - q.

        code = round(v * inverse): the low bits of the sum with `ROUNDING` are the code, in two's
        complement.
        """
        b = e.b
        inverses, steps = e.splat(inverse), e.splat(step)
        rounding = F32X32([float(ROUNDING)] * GROUP)

        def body(first: Value, tail: Value | None) -> None:
            index = b.add(at, first)
            v = e.load(r, index, tail)
            rounded = b.fadd(b.fmul(v, inverses), rounding)
            q = b.fmul(b.fsub(rounded, rounding), steps)
            e.store(b.fsub(v, q), r, index, tail)
            codes = b.shl(e.mask(e.words(rounded), 2**bits - 1), I32X32(places))
            while (half := codes.type.count // 2) >= width:  # join the codes of a byte
                codes = b.or_(e.lanes(codes, 0, half), e.lanes(codes, half, half))
            packed = b.trunc(codes, ir.VectorType(I8, width))
            place = e.place(payload, b.add(byte, b.udiv(b.mul(first, I64(bits)), I64(8))), I8)
            e.vector_store(packed, place, 4)
            e.fetch(g, b.add(index, n))

        e.groups(n, body)

    return pack_codes


def _unpack_codes(bits: int, how: How) -> Any:
    parts, width = 8 // bits, GROUP * bits // 8

    @vector_function("payload", "out", "int", "int", "int", "float")
    def unpack_codes(
        e: Emitter, payload: Value, out: Value, byte: Value, at: Value, n: Value, step: Value
    ) -> None:
        b = e.b
        steps = e.splat(step)
        kind = ir.VectorType(I8, width)

        def body(first: Value, tail: Value | None) -> None:
            source = e.place(payload, b.add(byte, b.udiv(b.mul(first, I64(bits)), I64(8))), I8)
            packed = e.vector_load(source, kind, 4)
            fields = [  # shift each field to the top, then down with its sign
                b.ashr(b.shl(packed, kind([8 - bits * (i + 1)] * width)), kind([8 - bits] * width))
                for i in range(parts)
            ]
            while len(fields) > 1:
                fields = [e.join(a, c) for a, c in zip(fields[::2], fields[1::2], strict=True)]
            q = b.fmul(b.sitofp(b.sext(fields[0], I32X32), F32X32), steps)
            e.put(q, out, b.add(at, first), tail, how)

        e.groups(n, body)

    return unpack_codes


decode_raw, decode_raw_add = _decode_raw(How.SET), _decode_raw(How.ADD)
unpack_bits, unpack_bits_stream, unpack_bits_add = map(_unpack_bits, How)
pack_codes_4, pack_codes_8 = map(_pack_codes, (4, 8))
unpack_codes_4, unpack_codes_4_stream, unpack_codes_4_add = (_unpack_codes(4, how) for how in How)
unpack_codes_8, unpack_codes_8_stream, unpack_codes_8_add = (_unpack_codes(8, how) for how in How)


@vector_function("g", "r", "half", "int")
def encode_bfloat16(e: Emitter, g: Value, r: Value, half: Value, n: Value) -> None:
    """Round to nearest even by integer arithmetic, as in the reference."""
    b = e.b
    up = I32X32([16] * GROUP)

    def body(first: Value, tail: Value | None) -> None:
        v = b.fadd(e.load(g, first, tail), e.load(r, first, tail))
        word = e.words(v)
        odd = e.mask(b.lshr(word, up), 1)
        word = b.add(word, b.add(odd, I32X32([0x7FFF] * GROUP)))
        e.store(b.trunc(b.lshr(word, up), ir.VectorType(I16, GROUP)), half, first, tail)
        e.store(b.fsub(v, e.floats(e.mask(word, 0xFFFF0000))), r, first, tail)

    e.groups(n, body)


@vector_function("g", "r", "half", "int")
def encode_float16(e: Emitter, g: Value, r: Value, half: Value, n: Value) -> None:
    """Round to nearest even by float arithmetic, and clip to ±65504.

    A float16 below 2**(E+1), E >= -14, is a multiple of 2**(E-10). So adding 2**(E+13) rounds to a
    float16, denormal or not; the sum's low bits are its significand, and subtracting gives q.
    """
    b = e.b

    largest_half = every_lane(int(LARGEST_HALF.view(np.uint32)))
    smallest_normal = every_lane((127 - 14) << 23)

    def body(first: Value, tail: Value | None) -> None:
        v = b.fadd(e.load(g, first, tail), e.load(r, first, tail))
        word = e.words(v)
        sign, magnitude = e.mask(word, 0x80000000), e.mask(word, 0x7FFFFFFF)
        clip = b.icmp_unsigned("<", magnitude, largest_half)
        magnitude = b.select(clip, magnitude, largest_half)
        exponent = e.larger(e.mask(magnitude, 0x7F800000), smallest_normal)
        rounding = b.add(exponent, every_lane(13 << 23))
        rounded = b.fadd(e.floats(magnitude), e.floats(rounding))
        code = b.add(
            b.sub(e.words(rounded), rounding),
            b.lshr(b.sub(exponent, smallest_normal), every_lane(13)),
        )
        code = b.or_(code, b.lshr(sign, every_lane(16)))
        e.store(b.trunc(code, ir.VectorType(I16, GROUP)), half, first, tail)
        q = b.or_(e.words(b.fsub(rounded, e.floats(rounding))), sign)
        e.store(b.fsub(v, e.floats(q)), r, first, tail)

    e.groups(n, body)
