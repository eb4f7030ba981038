"""Operations on 64-bit words with a bit for each of 64 values.

A comparison of 64 values gives a word. `pack_bits` (x86's pext) packs the bits, or bytes, of the
marked values side by side, and `spread_bits` (pdep) spreads them again; so no operation loops over
single values. Processors without these two instructions use loops. Used by the entropy code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from .emitter import I1, I8, I64, Emitter, Value, call, vector_function

U64 = np.uint64
WORD = 64  #: values in a word

#: Processors with a feature, used if NUMBA_CPU_NAME is set without a list of features.
_V4 = ("skylake-avx512", "icelake-server", "x86-64-v4", "znver4")
_V3 = ("haswell", "skylake", "x86-64-v3", "znver3", *_V4)
FEATURES_OF = {
    "bmi2": _V3,
    "avx2": _V3,
    "avx512f": _V4,
    "avx512vbmi2": ("icelake-server", "znver4"),
}


def has_feature(context: Any, feature: str) -> bool:
    """Return True if machine code is made for processors with a feature of x86."""
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
        if has_feature(context, "bmi2"):
            return call(b, f"llvm.x86.bmi.{name}.64", I64, *arguments)
        return context.compile_internal(b, loop, signature, arguments)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def pack_bits(context: Any, x: Any, marked: Any) -> Any:
    """Return the marked bits of x, side by side from the lowest."""
    return _bmi2("pext", _pack_bits_by_loop)


@intrinsic
def spread_bits(context: Any, x: Any, marked: Any) -> Any:
    """Return the lowest bits of x, spread to the marked places: the inverse of `pack_bits`."""
    return _bmi2("pdep", _spread_bits_by_loop)


@intrinsic
def count_bits(context: Any, x: Any) -> Any:
    return types.int64(types.uint64), lambda c, b, s, a: call(b, "llvm.ctpop.i64", I64, a[0])


@intrinsic
def lowest_bit(context: Any, x: Any) -> Any:
    """Return the index of the lowest bit of a non-zero word."""
    return types.int64(types.uint64), lambda c, b, s, a: b.cttz(a[0], I1(1))


@intrinsic
def funnel(context: Any, high: Any, low: Any, by: Any) -> Any:
    """Return 64 of the 128 bits high:low, from bit `by` < 64."""
    kinds = (types.uint64, types.uint64, types.int64)
    return types.uint64(*kinds), lambda c, b, s, a: call(b, "llvm.fshr.i64", I64, *a)


@vector_function("bytes", "int", returns=types.uint64)
def load_word(e: Emitter, array: Value, byte: Value) -> Value:
    """Load 8 bytes from any byte of an array."""
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


def _asks_for(*features: str) -> Any:
    def typing(context: Any) -> Any:
        return types.boolean(), lambda c, b, s, a: I1(
            all(has_feature(c, name) for name in features)
        )

    return intrinsic(typing)


has_avx2 = _asks_for("bmi2", "avx2")  #: () -> True if AVX2 and BMI2 are available
compresses = _asks_for("avx512vbmi2")  #: () -> True if `compress_word` is a few instructions
