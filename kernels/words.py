"""Words of 64 bits, each of which speaks for 64 values: the vector code of `entropy`.

A comparison of 64 values gives a word. Of the values that a word marks, `pack_bits` (x86's pext)
puts the bits, or bytes, side by side, and `spread_bits` (pdep) puts them back; so nothing here goes
through values one by one. Processors without these two instructions get loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .emitter import F32X32, FLOAT, I1, I8, I16, I32, I64, Emitter, Value, vector_function

U64 = np.uint64
BLOCK = 2048  #: values that are coded together
WORD = 64  #: values of a word
CHUNK = 32  #: values that are quantized at a time

#: Processors that have a feature, where NUMBA_CPU_NAME names one and no features are listed.
FEATURES_OF = {
    "bmi2": ("haswell", "skylake", "skylake-avx512", "x86-64-v3", "x86-64-v4", "znver3", "znver4"),
    "avx512vbmi2": ("icelake-server", "znver4"),
}

_V64X8, _V64X16 = ir.VectorType(I8, WORD), ir.VectorType(I16, WORD)
_V16X8, _V16X16 = ir.VectorType(I8, 16), ir.VectorType(I16, 16)


def _call(b: Any, name: str, returns: ir.Type, *arguments: Value) -> Value:
    kind = ir.FunctionType(returns, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def _splat(b: Any, scalar: Value, kind: ir.VectorType) -> Value:
    one = b.insert_element(kind(ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(
        one, kind(ir.Undefined), ir.VectorType(I32, kind.count)([0] * kind.count)
    )


def _has(context: Any, feature: str) -> bool:
    """Whether machine code is made for processors that have a feature of x86."""
    codegen = context.codegen()
    name, features = codegen._get_host_cpu_name(), codegen._tm_features.split(",")
    implied = FEATURES_OF.get(feature, ())
    return f"+{feature}" in features or (name in implied and f"-{feature}" not in features)


def _pack_bits_by_loop(x: Any, marked: Any) -> Any:
    packed, bit = U64(0), U64(1)
    while marked:
        lowest = marked & (~marked + U64(1))
        if x & lowest:
            packed |= bit
        bit += bit
        marked ^= lowest
    return packed


def _spread_bits_by_loop(x: Any, marked: Any) -> Any:
    spread = U64(0)
    while marked:
        lowest = marked & (~marked + U64(1))
        if x & U64(1):
            spread |= lowest
        x >>= U64(1)
        marked ^= lowest
    return spread


def _bmi2(name: str, loop: Any) -> Any:
    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Value:
        if _has(context, "bmi2"):
            return _call(b, f"llvm.x86.bmi.{name}.64", I64, *arguments)
        return context.compile_internal(b, loop, signature, arguments)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def pack_bits(context: Any, x: Any, marked: Any) -> Any:
    """The bits of x that are marked, side by side from the lowest."""
    return _bmi2("pext", _pack_bits_by_loop)


@intrinsic
def spread_bits(context: Any, x: Any, marked: Any) -> Any:
    """The lowest bits of x at the places that are marked: the inverse of `pack_bits`."""
    return _bmi2("pdep", _spread_bits_by_loop)


@intrinsic
def count_bits(context: Any, x: Any) -> Any:
    return types.int64(types.uint64), lambda c, b, s, a: _call(b, "llvm.ctpop.i64", I64, a[0])


@intrinsic
def lowest_bit(context: Any, x: Any) -> Any:
    """The place of the lowest bit of a word that has one."""
    return types.int64(types.uint64), lambda c, b, s, a: b.cttz(a[0], I1(1))


@intrinsic
def funnel(context: Any, high: Any, low: Any, by: Any) -> Any:
    """64 of the 128 bits high:low, from bit `by` on, which is below 64."""
    kinds = (types.uint64, types.uint64, types.int64)
    return types.uint64(*kinds), lambda c, b, s, a: _call(b, "llvm.fshr.i64", I64, *a)


@vector_function("bytes", "int", returns=types.uint64)
def load_word(e: Emitter, array: Value, byte: Value) -> Value:
    """The 8 bytes from any byte of an array on."""
    return e.vector_load(e.place(array, byte, I8), I64, 1)


@intrinsic
def store_word(context: Any, array: Any, byte: Any, word: Any) -> Any:
    """Store 8 bytes at any byte of an array."""

    def generate(c: Any, b: Any, s: Any, a: Any) -> Value:
        data = c.make_array(s.args[0])(c, b, a[0]).data
        place = b.gep(b.bitcast(data, I8.as_pointer()), [a[1]], source_etype=I8)
        b.store(a[2], b.bitcast(place, I64.as_pointer()), align=1)
        return c.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


def _quantize(with_gradient: bool) -> Any:
    @vector_function("g", "int", "r", "int", "float", "float", "k16", "k8", returns=types.int64)
    def quantize(
        e: Emitter,
        g: Value,
        at: Value,
        r: Value,
        r_at: Value,
        inverse: Value,
        step: Value,
        k16: Value,
        k8: Value,
    ) -> Value:
        """k = clip(rint(v * inverse));  r = v - k * step, of a block of 2048 with v = g + r (or r).

        Returns the bits that any |k| has. k8 has k where that is below 128.
        """
        b = e.b
        kind16, kind8 = ir.VectorType(I16, CHUNK), ir.VectorType(I8, CHUNK)
        kind32 = ir.VectorType(I32, CHUNK)
        inverses, steps = e.splat(inverse), e.splat(step)
        most = F32X32([32767.0] * CHUNK)
        least = F32X32([-32767.0] * CHUNK)
        bits = cgutils.alloca_once_value(b, kind16([0] * CHUNK))
        with cgutils.for_range(b, I64(BLOCK // CHUNK)) as loop:
            i = b.mul(loop.index, I64(CHUNK))
            r_place = b.add(r_at, i)
            v = e.load(r, r_place, None)
            if with_gradient:
                g_place = b.add(at, i)
                v = b.fadd(e.load(g, g_place, None), v)
                _fetch(e, g, b.add(g_place, I64(BLOCK)), CHUNK)
            t = _call(b, "llvm.rint.v32f32", F32X32, b.fmul(v, inverses))
            t = b.select(b.fcmp_ordered(">", t, least), t, least)
            t = b.select(b.fcmp_ordered("<", t, most), t, most)
            e.store(b.fsub(v, b.fmul(t, steps)), r, r_place, None)
            k = _saturated(b, b.fptosi(t, kind32), kind16)
            size = _call(b, "llvm.abs.v32i16", kind16, k, I1(0))
            b.store(b.or_(b.load(bits, typ=kind16), size), bits)
            e.vector_store(k, e.place(k16, i, I16), 2)
            e.vector_store(_saturated(b, k, kind8), e.place(k8, i, I8), 1)
        return b.zext(_call(b, "llvm.vector.reduce.or.v32i16", I16, b.load(bits, typ=kind16)), I64)

    return quantize


def _saturated(b: Any, x: Value, kind: ir.VectorType) -> Value:
    """To fewer bits: processors have an instruction for it, and none for what cuts bits off."""
    top = 2 ** (kind.element.width - 1)
    width = f"v{x.type.count}i{x.type.element.width}"
    x = _call(b, f"llvm.smax.{width}", x.type, x, x.type([-top] * x.type.count))
    x = _call(b, f"llvm.smin.{width}", x.type, x, x.type([top - 1] * x.type.count))
    return b.trunc(x, kind)


quantize_sum, quantize = _quantize(True), _quantize(False)


@vector_function("x", "int")
def fetch_word(e: Emitter, x: Value, at: Value) -> None:
    """Begin to load 64 values into the second-level cache."""
    _fetch(e, x, at, WORD)


def _fetch(e: Emitter, x: Value, at: Value, count: int) -> None:
    b = e.b
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    for line in range(0, count, 16):
        place = e.place(x, b.add(at, I64(line)), FLOAT)
        b.call(prefetch, [b.bitcast(place, I8.as_pointer()), I32(0), I32(2), I32(1)])


def _asks_for(feature: str) -> Any:
    def typing(context: Any) -> Any:
        return types.boolean(), lambda c, b, s, a: I1(_has(c, feature))

    return intrinsic(typing)


packs_bits = _asks_for("bmi2")  #: () -> whether `pack_bits` and `spread_bits` are instructions
compresses = _asks_for("avx512vbmi2")  #: () -> whether `compress_word` is a few instructions


@vector_function("k8", "int", "live", "places", "int", returns=types.uint64)
def compress_word(e: Emitter, k8: Value, at: Value, live: Value, places: Value, to: Value) -> Value:
    """Put those of k8[at : at + 64] that are not 0 to live[to:], and their places to places[to:].

    Returns which these are. What lies behind them, up to 64, is written, too.
    """
    b = e.b
    values = e.vector_load(e.place(k8, at, I8), _V64X8, 1)
    is_live = b.icmp_signed("!=", values, _V64X8([0] * WORD))
    for x, target in ((values, live), (_V64X8(list(range(WORD))), places)):
        packed = _call(
            b, "llvm.experimental.vector.compress.v64i8", _V64X8, x, is_live, _V64X8(ir.Undefined)
        )
        e.vector_store(packed, e.place(target, to, I8), 1)
    return b.bitcast(is_live, I64)


@vector_function("k8", "int", "marks", returns=types.uint64)
def mark_live(e: Emitter, k8: Value, at: Value, marks: Value) -> Value:
    """Which of 64 int8 are not 0; marks[0:64] = 255 for these, and 0."""
    b = e.b
    live = b.icmp_signed("!=", e.vector_load(e.place(k8, at, I8), _V64X8, 1), _V64X8([0] * WORD))
    e.vector_store(b.sext(live, _V64X8), e.place(marks, I64(0), I8), 1)
    return b.bitcast(live, I64)


@vector_function("pos8", "int", "int", "pos16", "int")
def widen_places(e: Emitter, pos8: Value, at: Value, base: Value, pos16: Value, to: Value) -> None:
    """pos16[to : to + 16] = base + pos8[at : at + 16]"""
    b = e.b
    places = b.zext(e.vector_load(e.place(pos8, at, I8), _V16X8, 1), _V16X16)
    places = b.add(places, _splat(b, b.trunc(base, I16), _V16X16))
    e.vector_store(places, e.place(pos16, to, I16), 2)


@vector_function("pos16", "int", "x")
def gaps(e: Emitter, pos16: Value, at: Value, x: Value) -> None:
    """x[at : at + 64] = pos16[at + 1 : ...] - pos16[at : ...] - 1"""
    b = e.b
    here = e.vector_load(e.place(pos16, b.add(at, I64(1)), I16), _V64X16, 2)
    before = e.vector_load(e.place(pos16, at, I16), _V64X16, 2)
    gap = b.sub(b.sub(here, before), _V64X16([1] * WORD))
    e.vector_store(gap, e.place(x, at, I16), 2)


@vector_function("live", "int", "x", returns=types.Tuple([types.uint64, types.int64]))
def sizes_8(e: Emitter, live: Value, at: Value, x: Value) -> list[Value]:
    """x[at : at + 64] = max(|live| - 1, 0) of 64 int8;  (which are negative, the sum of x)"""
    b = e.b
    k = b.sext(e.vector_load(e.place(live, at, I8), _V64X8, 1), _V64X16)
    return _sizes(e, k, at, x)


@vector_function("live", "int", "x", returns=types.Tuple([types.uint64, types.int64]))
def sizes_16(e: Emitter, live: Value, at: Value, x: Value) -> list[Value]:
    """The same of int16."""
    return _sizes(e, e.vector_load(e.place(live, at, I16), _V64X16, 2), at, x)


def _sizes(e: Emitter, k: Value, at: Value, x: Value) -> list[Value]:
    b = e.b
    zero, one = _V64X16([0] * WORD), _V64X16([1] * WORD)
    is_negative = b.icmp_signed("<", k, zero)
    size = b.sub(b.select(is_negative, b.sub(zero, k), k), one)
    size = b.select(b.icmp_signed(">", size, zero), size, zero)
    e.vector_store(size, e.place(x, at, I16), 2)
    total = _call(b, "llvm.vector.reduce.add.v64i32", I32, b.zext(size, ir.VectorType(I32, WORD)))
    return [b.bitcast(is_negative, I64), b.zext(total, I64)]


@vector_function("x", "int", "int", returns=types.uint64)
def with_bit(e: Emitter, x: Value, at: Value, bit: Value) -> Value:
    """Which of 64 uint16 have a bit, given as a number that has just this one."""
    b = e.b
    bits = _splat(b, b.trunc(bit, I16), _V64X16)
    values = e.vector_load(e.place(x, at, I16), _V64X16, 2)
    return b.bitcast(b.icmp_unsigned("!=", b.and_(values, bits), _V64X16([0] * WORD)), I64)


@vector_function("x", "int", "int", returns=types.uint64)
def at_least(e: Emitter, x: Value, at: Value, least: Value) -> Value:
    """Which of 64 int16 are at least so large."""
    b = e.b
    bound = _splat(b, b.trunc(b.sub(least, I64(1)), I16), _V64X16)
    values = e.vector_load(e.place(x, at, I16), _V64X16, 2)
    return b.bitcast(b.icmp_signed(">", values, bound), I64)


@vector_function("words", "int", "int", "x", "int", returns=types.int64)
def numbers_of_planes(
    e: Emitter, words: Value, first: Value, planes: Value, x: Value, at: Value
) -> Value:
    """x[at : at + 64] (uint16) = the numbers whose bit j is in words[first + j], j < planes.

    Returns the bits that any of them has.
    """
    b = e.b
    zero, bits = _V16X16([0] * 16), ir.VectorType(I1, 16)
    pieces = [cgutils.alloca_once(b, _V16X16) for _ in range(4)]
    for piece in pieces:
        b.store(zero, piece)
    with cgutils.for_range(b, planes) as loop:
        word = b.load(b.gep(words, [b.add(first, loop.index)], source_etype=I64), typ=I64)
        weight = _splat(b, b.trunc(b.shl(I64(1), loop.index), I16), _V16X16)
        for number, piece in enumerate(pieces):
            here = b.bitcast(b.trunc(b.lshr(word, I64(16 * number)), I16), bits)
            new = b.or_(b.load(piece, typ=_V16X16), b.select(here, weight, zero))
            b.store(new, piece)
    either = zero
    for number, piece in enumerate(pieces):
        numbers = b.load(piece, typ=_V16X16)
        either = b.or_(either, numbers)
        e.vector_store(numbers, e.place(x, b.add(at, I64(16 * number)), I16), 2)
    return b.zext(_call(b, "llvm.vector.reduce.or.v16i16", I16, either), I64)


@vector_function("x", "int", "int", "float", "q")
def dequantize(e: Emitter, x: Value, at: Value, signs: Value, step: Value, q: Value) -> None:
    """q[at : at + 64] = step * (x + 1), negative where the word `signs` says so"""
    b = e.b
    f16, bits = ir.VectorType(FLOAT, 16), ir.VectorType(I1, 16)
    steps = _splat(b, step, f16)
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
    """The sum of x >> by, of 64 int16 that are not negative."""
    b = e.b
    shifts = _splat(b, b.trunc(by, I16), _V64X16)
    values = b.lshr(e.vector_load(e.place(x, at, I16), _V64X16, 2), shifts)
    wide = b.zext(values, ir.VectorType(I32, WORD))
    return b.zext(_call(b, "llvm.vector.reduce.add.v64i32", I32, wide), I64)


@vector_function("x", "int")
def clear(e: Emitter, x: Value, at: Value) -> None:
    """x[at : at + 64] = 0, of int16"""
    e.vector_store(_V64X16([0] * WORD), e.place(x, at, I16), 2)
