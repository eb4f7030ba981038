"""The loops of the entropy code on 64 values, in the vector code of `emitter`.

A mask of the 64 values is a word: see `words`. Used by `entropy_encoding` and `entropy_decoding`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .emitter import F32X32, FLOAT, I1, I8, I16, I32, I64, Emitter, Value, call, vector_function
from .entropy_reference import BLOCK
from .words import WORD, has_feature

HALF = WORD // 2  #: values quantized at a time
AHEAD = BLOCK + BLOCK // 4  #: values: the distance of prefetching, ahead of the current block

_V64X8, _V64X16 = ir.VectorType(I8, WORD), ir.VectorType(I16, WORD)
_V16X8, _V16X16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)


def _quantize(with_gradient: bool) -> Any:
    kinds = ("g", "r", "int", "int", "float", "float", "k16", "k8")

    @vector_function(*kinds, returns=types.int64)
    def quantize(
        e: Emitter,
        g: Value,
        r: Value,
        at: Value,
        r_ahead: Value,
        inverse: Value,
        step: Value,
        k16: Value,
        k8: Value,
    ) -> Value:
        """Quantize a block: k = clip(rint(v * inverse));  r = v - k * step, with v = g + r (or r).

        The block has 2048 values. k16 receives k, and k8 receives k clipped to int8. Meanwhile g is
        prefetched AHEAD of the block, and r by `r_ahead` values. Returns the bitwise or of all |k|.
        """
        b = e.b
        kind16, kind8 = ir.VectorType(I16, HALF), ir.VectorType(I8, HALF)
        kind32 = ir.VectorType(I32, HALF)
        inverses, steps = e.splat(inverse), e.splat(step)
        most = F32X32([32767.0] * HALF)
        least = F32X32([-32767.0] * HALF)
        bits = cgutils.alloca_once_value(b, kind16([0] * HALF))
        with cgutils.for_range(b, I64(BLOCK // HALF)) as loop:
            i = b.mul(loop.index, I64(HALF))
            place = b.add(at, i)
            v = e.load(r, place, None)
            e.fetch(r, b.add(place, r_ahead), HALF, cache=2)
            if with_gradient:
                v = b.fadd(e.load(g, place, None), v)
                e.fetch(g, b.add(place, I64(AHEAD)), HALF, cache=2)
            t = call(b, "llvm.rint.v32f32", F32X32, b.fmul(v, inverses))
            t = b.select(b.fcmp_ordered(">", t, least), t, least)
            t = b.select(b.fcmp_ordered("<", t, most), t, most)
            e.store(b.fsub(v, b.fmul(t, steps)), r, place, None)
            k = _saturated(b, b.fptosi(t, kind32), kind16)
            size = call(b, "llvm.abs.v32i16", kind16, k, I1(0))
            b.store(b.or_(b.load(bits, typ=kind16), size), bits)
            e.vector_store(k, e.place(k16, i, I16), 2)
            e.vector_store(_saturated(b, k, kind8), e.place(k8, i, I8), 1)
        return b.zext(call(b, "llvm.vector.reduce.or.v32i16", I16, b.load(bits, typ=kind16)), I64)

    return quantize


def _saturated(b: Any, x: Value, kind: ir.VectorType) -> Value:
    """Clip to a narrower integer type.

    Processors have an instruction for clipping, but not for cutting bits off.
    """
    top = 2 ** (kind.element.width - 1)
    width = f"v{x.type.count}i{x.type.element.width}"
    x = call(b, f"llvm.smax.{width}", x.type, x, x.type([-top] * x.type.count))
    x = call(b, f"llvm.smin.{width}", x.type, x, x.type([top - 1] * x.type.count))
    return b.trunc(x, kind)


quantize_sum, quantize = _quantize(True), _quantize(False)


@vector_function("x", "int", "int")
def fetch_eighth(e: Emitter, x: Value, block: Value, part: Value) -> None:
    """Begin to load an eighth of a block into the second-level cache.

    A processor stalls with more than some dozens of outstanding loads. So a block is fetched in
    parts, with work in between.
    """
    place = e.b.add(block, e.b.mul(part, I64(BLOCK // 8)))
    e.fetch(x, place, BLOCK // 8, cache=2)


@vector_function("k8", "int", "live", "int", "places", "int", returns=types.uint64)
def compress_word(
    e: Emitter, k8: Value, at: Value, live: Value, to: Value, places: Value, places_to: Value
) -> Value:
    """Pack the non-zero values of k8[at : at + 64] into live[to:].

    Their places go to places[places_to:]. Returns the mask of non-zero values. Up to 64 elements
    are written, also beyond the packed ones.
    """
    b = e.b
    values = e.vector_load(e.place(k8, at, I8), _V64X8, 1)
    is_live = b.icmp_signed("!=", values, _V64X8([0] * WORD))
    e.vector_store(_compressed(b, values, is_live), e.place(live, to, I8), 1)
    mask = b.bitcast(is_live, I64)
    half = ir.VectorType(I16, HALF)
    for first in (0, HALF):
        numbers = b.add(e.splat(b.trunc(at, I16), HALF), half(list(range(first, first + HALF))))
        marked = b.trunc(b.lshr(mask, I64(first)), I32)
        chosen = _compressed(b, numbers, b.bitcast(marked, ir.VectorType(I1, HALF)))
        e.vector_store(chosen, e.place(places, places_to, I16), 2)
        places_to = b.add(places_to, b.zext(call(b, "llvm.ctpop.i32", I32, marked), I64))
    return mask


def _compressed(b: Any, x: Value, marked: Value) -> Value:
    width = f"v{x.type.count}i{x.type.element.width}"
    name = f"llvm.experimental.vector.compress.{width}"
    return call(b, name, x.type, x, marked, x.type(ir.Undefined))


@vector_function("k8", "int", "numbers", "live", "int", "places", "int")
def squeeze_octet(
    e: Emitter,
    k8: Value,
    at: Value,
    numbers: Value,
    live: Value,
    to: Value,
    places: Value,
    places_to: Value,
) -> None:
    """Pack some of k8[at : at + 8] into live[to:], and their places into places[places_to:].

    `numbers` holds their indices, one byte each. Up to 8 elements are written, also beyond the
    packed ones. Requires AVX2.
    """
    b = e.b
    v8x8, v8x16 = ir.VectorType(I8, 8), ir.VectorType(I16, 8)
    values = e.vector_load(e.place(k8, at, I8), v8x8, 1)
    which = b.bitcast(numbers, v8x8)
    e.vector_store(_shuffled(e, values, which), e.place(live, to, I8), 1)
    numbers = b.add(b.zext(which, v8x16), e.splat(b.trunc(at, I16), 8))
    e.vector_store(numbers, e.place(places, places_to, I16), 2)


def _shuffled(e: Emitter, x: Value, which: Value) -> Value:
    """Return x[which], for 8 bytes."""
    b = e.b
    wide = ir.VectorType(I32, 16)(list(range(16)))
    narrow = ir.VectorType(I32, 8)(list(range(8)))
    x, which = (b.shuffle_vector(v, v, wide) for v in (x, which))
    shuffled = call(b, "llvm.x86.ssse3.pshuf.b.128", _V16X8, x, which)
    return b.shuffle_vector(shuffled, shuffled, narrow)


@vector_function("k8", "int", returns=types.uint64)
def mark_live(e: Emitter, k8: Value, at: Value) -> Value:
    """Return the mask of non-zero values among 64 int8."""
    b = e.b
    live = b.icmp_signed("!=", e.vector_load(e.place(k8, at, I8), _V64X8, 1), _V64X8([0] * WORD))
    return b.bitcast(live, I64)


def _marked(add: bool) -> Any:
    @vector_function("out", "int", "int", "q", "int", returns=types.int64)
    def use_marked(e: Emitter, out: Value, at: Value, mask: Value, q: Value, i: Value) -> Value:
        """Spread q[i:] over the values of out[at : at + 64] marked by `mask`, and add or set these.

        Unmarked values stay, or are set to 0. Returns the index after the last used q. Requires
        AVX2 and BMI2.
        """
        b = e.b
        lanes = 16 if has_feature(e.context, "avx512f") else 8
        kind = ir.VectorType(FLOAT, lanes)
        others = kind([-0.0 if add else 0.0] * lanes)  # x + -0 is x, also for zeros
        for first in range(0, WORD, lanes):
            part = b.trunc(b.lshr(mask, I64(first)), ir.IntType(lanes))
            x = e.vector_load(e.place(q, i, FLOAT), kind, 4)
            x = _spread_16(b, x, part, others) if lanes == 16 else _spread_8(b, x, part, others)
            place = e.place(out, b.add(at, I64(first)), FLOAT)
            e.vector_store(b.fadd(e.vector_load(place, kind, 4), x) if add else x, place, 4)
            i = b.add(i, b.zext(call(b, f"llvm.ctpop.i{lanes}", part.type, part), I64))
        return i

    return use_marked


def _spread_16(b: Any, x: Value, mask: Value, others: Value) -> Value:
    name = "llvm.x86.avx512.mask.expand.v16f32"
    return call(b, name, x.type, x, others, b.bitcast(mask, ir.VectorType(I1, 16)))


def _spread_8(b: Any, x: Value, mask: Value, others: Value) -> Value:
    """Expand the mask to bytes of ones, number these 0, 1, ..., and permute."""
    v8x8, v8x32 = ir.VectorType(I8, 8), ir.VectorType(I32, 8)
    ones = call(b, "llvm.x86.bmi.pdep.64", I64, b.zext(mask, I64), I64(0x0101010101010101))
    marked = b.sub(b.shl(ones, I64(8)), ones)
    numbers = call(b, "llvm.x86.bmi.pdep.64", I64, I64(0x0706050403020100), marked)
    numbers = b.zext(b.bitcast(numbers, v8x8), v8x32)
    spread = call(b, "llvm.x86.avx2.permps", x.type, x, numbers)
    is_marked = b.icmp_signed("<", b.sext(b.bitcast(marked, v8x8), v8x32), v8x32([0] * 8))
    return b.select(is_marked, spread, others)


add_marked, set_marked = _marked(True), _marked(False)


@vector_function("places", "int", "x")
def gaps(e: Emitter, places: Value, at: Value, x: Value) -> None:
    """Set x[at : at + 64] = places[at + 1 : ...] - places[at : ...] - 1."""
    b = e.b
    here = e.vector_load(e.place(places, b.add(at, I64(1)), I16), _V64X16, 2)
    before = e.vector_load(e.place(places, at, I16), _V64X16, 2)
    gap = b.sub(b.sub(here, before), _V64X16([1] * WORD))
    e.vector_store(gap, e.place(x, at, I16), 2)


@vector_function("live", "int", "x", returns=types.Tuple([types.uint64, types.int64]))
def sizes_8(e: Emitter, live: Value, at: Value, x: Value) -> list[Value]:
    """Set x[at : at + 64] = max(|live| - 1, 0) of 64 int8. Return (mask of negatives, sum of x)."""
    b = e.b
    k = b.sext(e.vector_load(e.place(live, at, I8), _V64X8, 1), _V64X16)
    return _sizes(e, k, at, x)


@vector_function("live", "int", "x", returns=types.Tuple([types.uint64, types.int64]))
def sizes_16(e: Emitter, live: Value, at: Value, x: Value) -> list[Value]:
    """Do the same as `sizes_8` for int16."""
    return _sizes(e, e.vector_load(e.place(live, at, I16), _V64X16, 2), at, x)


def _sizes(e: Emitter, k: Value, at: Value, x: Value) -> list[Value]:
    b = e.b
    zero, one = _V64X16([0] * WORD), _V64X16([1] * WORD)
    is_negative = b.icmp_signed("<", k, zero)
    size = b.sub(b.select(is_negative, b.sub(zero, k), k), one)
    size = b.select(b.icmp_signed(">", size, zero), size, zero)
    e.vector_store(size, e.place(x, at, I16), 2)
    total = call(b, "llvm.vector.reduce.add.v64i32", I32, b.zext(size, ir.VectorType(I32, WORD)))
    return [b.bitcast(is_negative, I64), b.zext(total, I64)]


@vector_function("x", "int", "int", returns=types.uint64)
def with_bit(e: Emitter, x: Value, at: Value, bit: Value) -> Value:
    """Return the mask of those of 64 uint16 that have a bit, given as a power of two."""
    b = e.b
    bits = e.splat(b.trunc(bit, I16), WORD)
    values = e.vector_load(e.place(x, at, I16), _V64X16, 2)
    return b.bitcast(b.icmp_unsigned("!=", b.and_(values, bits), _V64X16([0] * WORD)), I64)


@vector_function("x", "int", "int", returns=types.uint64)
def at_least(e: Emitter, x: Value, at: Value, least: Value) -> Value:
    """Return the mask of those of 64 int16 that are at least `least`: 1 to 32768."""
    b = e.b
    bound = e.splat(b.trunc(b.sub(least, I64(1)), I16), WORD)
    values = e.vector_load(e.place(x, at, I16), _V64X16, 2)
    return b.bitcast(b.icmp_signed(">", values, bound), I64)


@vector_function("words", "int", "int", "x", "int", returns=types.int64)
def numbers_of_planes(
    e: Emitter, words: Value, first: Value, planes: Value, x: Value, at: Value
) -> Value:
    """Set x[at : at + 64] (uint16) to numbers whose bit j is in words[first + j], j < planes.

    Returns the bitwise or of the numbers.
    """
    b = e.b
    zero, bits = _V16X16([0] * 16), ir.VectorType(I1, 16)
    pieces = [cgutils.alloca_once(b, _V16X16) for _ in range(4)]
    for piece in pieces:
        b.store(zero, piece)
    with cgutils.for_range(b, planes) as loop:
        word = b.load(b.gep(words, [b.add(first, loop.index)], source_etype=I64), typ=I64)
        weight = e.splat(b.trunc(b.shl(I64(1), loop.index), I16), 16)
        for number, piece in enumerate(pieces):
            here = b.bitcast(b.trunc(b.lshr(word, I64(16 * number)), I16), bits)
            new = b.or_(b.load(piece, typ=_V16X16), b.select(here, weight, zero))
            b.store(new, piece)
    either = zero
    for number, piece in enumerate(pieces):
        numbers = b.load(piece, typ=_V16X16)
        either = b.or_(either, numbers)
        e.vector_store(numbers, e.place(x, b.add(at, I64(16 * number)), I16), 2)
    return b.zext(call(b, "llvm.vector.reduce.or.v16i16", I16, either), I64)


@vector_function("x", "int", "int", "float", "q")
def dequantize(e: Emitter, x: Value, at: Value, signs: Value, step: Value, q: Value) -> None:
    """Set q[at : at + 64] = step * (x + 1), negated by the bits of `signs`."""
    b = e.b
    f16, bits = ir.VectorType(FLOAT, 16), ir.VectorType(I1, 16)
    steps = e.splat(step, 16)
    minus = b.fsub(f16([-0.0] * 16), steps)
    for first in range(0, WORD, 16):
        place = b.add(at, I64(first))
        sizes = b.zext(e.vector_load(e.place(x, place, I16), _V16X16, 2), ir.VectorType(I32, 16))
        sizes = b.add(sizes, ir.VectorType(I32, 16)([1] * 16))
        negative = b.bitcast(b.trunc(b.lshr(signs, I64(first)), I16), bits)
        values = b.fmul(b.sitofp(sizes, f16), b.select(negative, minus, steps))
        e.vector_store(values, e.place(q, place, FLOAT), 4)


@vector_function("x", "int", "int", returns=types.int64)
def sum_shifted(e: Emitter, x: Value, at: Value, by: Value) -> Value:
    """Return the sum of x >> by, of 64 non-negative int16."""
    b = e.b
    shifts = e.splat(b.trunc(by, I16), WORD)
    values = b.lshr(e.vector_load(e.place(x, at, I16), _V64X16, 2), shifts)
    wide = b.zext(values, ir.VectorType(I32, WORD))
    return b.zext(call(b, "llvm.vector.reduce.add.v64i32", I32, wide), I64)


@vector_function("x", "int")
def clear(e: Emitter, x: Value, at: Value) -> None:
    """Set x[at : at + 64] = 0, of int16."""
    e.vector_store(_V64X16([0] * WORD), e.place(x, at, I16), 2)
