"""Loops over blocks in LLVM vector code, for the Numba kernels in `cpu`.

Numba compiles a plain loop that packs bits to 0.5 G values/s. Written as operations on 32 values
at once (load <32 x float>, compare, bitcast <32 x i1> to i32, select, store) LLVM turns the same
loop into a compare-to-mask and a few masked instructions, on every processor it knows, and the
loop runs at the speed of memory. The 32 lanes are also the order of the sums: see
`reference.lane_sum`.

Every function here takes one block: arrays with the index of its first value (`at`), or of its
first packed byte (`byte`), and its number of values `n`. The last n % 32 values pass through a
stack buffer that is padded with zeros. Numba's cache does not watch this file: after a change,
touch `cpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .blocks import GROUP
from .reference import ROUNDING

I8, I32, I64, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
F32X32 = ir.VectorType(FLOAT, GROUP)
I32X32 = ir.VectorType(I32, GROUP)

Value = Any  # an ir.Value


def vector_function(*argument_types: str, returns: types.Type = types.void) -> Any:
    """Make a Numba intrinsic of a function that emits code for one block.

    Args:
        argument_types: the names of the arguments' kinds, only to be read: arrays stay arrays,
            ints become int64, floats float32.
    """
    numba_types = {"int": types.int64, "float": types.float32}

    def decorate(emit: Callable[..., Value]) -> Any:
        def typing(context: Any, *arguments: Any) -> Any:
            signature = returns(
                *(
                    numba_types.get(kind, given)
                    for kind, given in zip(argument_types, arguments, strict=True)
                )
            )

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Value:
                values = [
                    context.make_array(kind)(context, builder, value).data
                    if isinstance(kind, types.Array)
                    else value
                    for kind, value in zip(signature.args, values, strict=True)
                ]
                result = emit(Emitter(context, builder), *values)
                if isinstance(returns, types.BaseTuple):
                    return context.make_tuple(builder, returns, result)
                return context.get_dummy_value() if result is None else result

            return signature, generate

        # Numba reads the number and the names of the arguments from the function's signature.
        names = ", ".join(f"a{i}" for i in range(len(argument_types)))
        scope: dict[str, Any] = {"typing": typing}
        exec(f"def {emit.__name__}(context, {names}): return typing(context, {names})", scope)
        return intrinsic(scope[emit.__name__])

    return decorate


class Emitter:
    """The few vector operations that the kernels are made of."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.b = context, builder

    def groups(self, n: Value, body: Callable[[Value, Value | None], None]) -> None:
        """Emit `body(first, None)` for every full group and `body(first, tail)` for the rest."""
        b = self.b
        full = b.udiv(n, I64(GROUP))
        with cgutils.for_range(b, full) as loop:
            body(b.mul(loop.index, I64(GROUP)), None)
        tail = b.urem(n, I64(GROUP))
        with b.if_then(b.icmp_unsigned("!=", tail, I64(0)), likely=False):
            body(b.mul(full, I64(GROUP)), tail)

    def place(self, pointer: Value, index: Value, element: ir.Type) -> Value:
        pointer = self.b.bitcast(pointer, element.as_pointer())
        return self.b.gep(pointer, [index], source_etype=element)

    def vector_load(self, pointer: Value, kind: ir.Type, align: int) -> Value:
        pointer = self.b.bitcast(pointer, kind.as_pointer())
        return self.b.load(pointer, align=align, typ=kind)

    def vector_store(self, value: Value, pointer: Value, align: int) -> None:
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=align)

    def load(self, array: Value, index: Value, tail: Value | None) -> Value:
        """32 floats from `index`; of a tail, zeros after its end."""
        source = self.place(array, index, FLOAT)
        if tail is None:
            return self.vector_load(source, F32X32, 4)
        buffer = cgutils.alloca_once(self.b, F32X32)
        self.b.store(F32X32(None), buffer)
        self._copy(source, buffer, tail)
        return self.b.load(buffer, typ=F32X32)

    def store(self, value: Value, array: Value, index: Value, tail: Value | None) -> None:
        target = self.place(array, index, FLOAT)
        if tail is None:
            self.vector_store(value, target, 4)
            return
        buffer = cgutils.alloca_once(self.b, F32X32)
        self.b.store(value, buffer)
        self._copy(buffer, target, tail)

    def bits(self, payload: Value, byte: Value) -> Value:
        """The 32 bits at a byte, one a lane."""
        word = self.vector_load(self.place(payload, byte, I8), I32, 4)
        return self.b.bitcast(word, ir.VectorType(ir.IntType(1), GROUP))

    def _copy(self, source: Value, target: Value, count: Value) -> None:
        with cgutils.for_range(self.b, count) as loop:
            value = self.b.load(self.place(source, loop.index, FLOAT), typ=FLOAT)
            self.b.store(value, self.place(target, loop.index, FLOAT))

    def corrected(self, g: Value, r: Value, at: Value, tail: Value | None) -> Value:
        """v = g + r"""
        return self.b.fadd(self.load(g, at, tail), self.load(r, at, tail))

    def inside(self, tail: Value | None) -> Value:
        """<32 x i1>: which lanes hold values."""
        if tail is None:
            return ir.VectorType(ir.IntType(1), GROUP)([1] * GROUP)
        lanes = I32X32(list(range(GROUP)))
        return self.b.icmp_unsigned("<", lanes, self.splat(self.b.trunc(tail, I32)))

    def splat(self, scalar: Value) -> Value:
        kind = ir.VectorType(scalar.type, GROUP)
        one = self.b.insert_element(kind(ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(one, kind(ir.Undefined), I32X32([0] * GROUP))

    def lanes(self, vector: Value, first: int, count: int) -> Value:
        mask = ir.VectorType(I32, count)(list(range(first, first + count)))
        return self.b.shuffle_vector(vector, vector.type(ir.Undefined), mask)

    def join(self, low: Value, high: Value) -> Value:
        count = 2 * low.type.count
        return self.b.shuffle_vector(low, high, ir.VectorType(I32, count)(list(range(count))))

    def absolute(self, vector: Value) -> Value:
        word = self.b.bitcast(vector, I32X32)
        return self.b.bitcast(self.b.and_(word, I32X32([0x7FFFFFFF] * GROUP)), F32X32)

    def accumulator(self) -> Value:
        """32 zeros that the code may add to (LLVM keeps them in registers)."""
        place = cgutils.alloca_once(self.b, F32X32)
        self.b.store(F32X32(None), place)
        return place

    def add_to(self, accumulator: Value, vector: Value, where: Value | None = None) -> None:
        old = self.b.load(accumulator, typ=F32X32)
        new = self.b.fadd(old, vector)
        self.b.store(new if where is None else self.b.select(where, new, old), accumulator)

    def total(self, accumulator: Value) -> Value:
        """The 32 lanes, added by halves."""
        vector = self.b.load(accumulator, typ=F32X32)
        for half in (16, 8, 4, 2, 1):
            vector = self.b.fadd(self.lanes(vector, 0, half), self.lanes(vector, half, half))
        return self.b.extract_element(vector, I32(0))


@intrinsic
def float_to_word(context: Any, value: Any) -> Any:
    """The bits of a float32, as uint32."""
    return types.uint32(types.float32), lambda c, b, s, a: b.bitcast(a[0], I32)


@intrinsic
def word_to_float(context: Any, value: Any) -> Any:
    """The float32 with the bits of a uint32."""
    return types.float32(types.uint32), lambda c, b, s, a: b.bitcast(a[0], FLOAT)


@vector_function(
    "g",
    "r",
    "payload",
    "int",
    "int",
    "int",
    "float",
    returns=types.Tuple([types.float32, types.float32, types.int64]),
)
def classify(
    e: Emitter,
    g: Value,
    r: Value,
    payload: Value,
    at: Value,
    byte: Value,
    n: Value,
    threshold: Value,
) -> list[Value]:
    """Write bit = v >= threshold; (sum of v where bit, sum of v elsewhere, how many bits)."""
    b = e.b
    high, low, thresholds = e.accumulator(), e.accumulator(), e.splat(threshold)
    count = cgutils.alloca_once_value(b, I64(0))

    def body(first: Value, tail: Value | None) -> None:
        v = e.corrected(g, r, b.add(at, first), tail)
        bit = b.and_(b.fcmp_ordered(">=", v, thresholds), e.inside(tail))
        e.add_to(high, v, where=bit)
        e.add_to(low, v, where=b.not_(bit))
        word = b.bitcast(bit, I32)
        e.vector_store(word, e.place(payload, b.add(byte, b.udiv(first, I64(8))), I8), 4)
        b.store(b.add(b.load(count, typ=I64), b.zext(b.ctpop(word), I64)), count)

    e.groups(n, body)
    return [e.total(high), e.total(low), b.load(count, typ=I64)]


@vector_function("g", "r", "int", "int", returns=types.float32)
def plain_sum(e: Emitter, g: Value, r: Value, at: Value, n: Value) -> Value:
    """sum of v"""
    total = e.accumulator()
    e.groups(n, lambda first, tail: e.add_to(total, e.corrected(g, r, e.b.add(at, first), tail)))
    return e.total(total)


@vector_function("g", "r", "int", "int", "float", returns=types.float32)
def distance_sum(
    e: Emitter, g: Value, r: Value, at: Value, n: Value, centre: Value
) -> Value:
    """sum of |v - centre|"""
    total, centres = e.accumulator(), e.splat(centre)

    def body(first: Value, tail: Value | None) -> None:
        v = e.corrected(g, r, e.b.add(at, first), tail)
        e.add_to(total, e.absolute(e.b.fsub(v, centres)), where=e.inside(tail))

    e.groups(n, body)
    return e.total(total)


@vector_function("g", "r", "int", "int", returns=types.float32)
def largest(e: Emitter, g: Value, r: Value, at: Value, n: Value) -> Value:
    """max |v|, compared as integers, which order non-negative floats alike"""
    b = e.b
    place = cgutils.alloca_once_value(b, I32X32(None))

    def body(first: Value, tail: Value | None) -> None:
        v = b.bitcast(e.absolute(e.corrected(g, r, b.add(at, first), tail)), I32X32)
        old = b.load(place, typ=I32X32)
        b.store(b.select(b.icmp_unsigned(">", v, old), v, old), place)

    e.groups(n, body)
    word = b.load(place, typ=I32X32)
    for half in (16, 8, 4, 2, 1):
        low, high = e.lanes(word, 0, half), e.lanes(word, half, half)
        word = b.select(b.icmp_unsigned(">", low, high), low, high)
    return b.bitcast(b.extract_element(word, I32(0)), FLOAT)


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
    """r = v - (high if bit else low), with the bits that `classify` wrote."""
    b = e.b
    lows, highs = e.splat(low), e.splat(high)

    def body(first: Value, tail: Value | None) -> None:
        index = b.add(at, first)
        q = b.select(e.bits(payload, b.add(byte, b.udiv(first, I64(8)))), highs, lows)
        e.store(b.fsub(e.corrected(g, r, index, tail), q), r, index, tail)

    e.groups(n, body)


def _unpack_bits(add: bool) -> Any:
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
            q, index = b.select(bit, highs, lows), b.add(at, first)
            e.store(b.fadd(e.load(out, index, tail), q) if add else q, out, index, tail)

        e.groups(n, body)

    return unpack_bits


def _pack_codes(bits: int) -> Any:
    parts, width = 8 // bits, GROUP * bits // 8
    edge = float(2 ** (bits - 1) - 1)

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
        b = e.b
        inverses, steps = e.splat(inverse), e.splat(step)
        lowest, highest = F32X32([-edge] * GROUP), F32X32([edge] * GROUP)
        rounding = F32X32([float(ROUNDING)] * GROUP)

        def body(first: Value, tail: Value | None) -> None:
            index = b.add(at, first)
            v = e.corrected(g, r, index, tail)
            t = b.fmul(v, inverses)
            t = b.select(b.fcmp_ordered("<", t, lowest), lowest, t)
            t = b.select(b.fcmp_ordered(">", t, highest), highest, t)
            rounded = b.fadd(t, rounding)  # its low bits are the code, in two's complement
            q = b.fmul(b.fsub(rounded, rounding), steps)
            e.store(b.fsub(v, q), r, index, tail)
            codes = b.trunc(b.bitcast(rounded, I32X32), ir.VectorType(I8, GROUP))
            kind = ir.VectorType(I8, width)
            packed = kind(None)
            for i in range(parts):
                field = b.and_(e.lanes(codes, i * width, width), kind([2**bits - 1] * width))
                packed = b.or_(packed, b.shl(field, kind([i * bits] * width)))
            place = e.place(payload, b.add(byte, b.udiv(b.mul(first, I64(bits)), I64(8))), I8)
            e.vector_store(packed, place, 4)

        e.groups(n, body)

    return pack_codes


def _unpack_codes(bits: int, add: bool) -> Any:
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
            fields = [  # each field to the top, and down again with its sign
                b.ashr(
                    b.shl(packed, kind([8 - bits * (i + 1)] * width)), kind([8 - bits] * width)
                )
                for i in range(parts)
            ]
            while len(fields) > 1:
                fields = [
                    e.join(a, c) for a, c in zip(fields[::2], fields[1::2], strict=True)
                ]
            q = b.fmul(b.sitofp(b.sext(fields[0], I32X32), F32X32), steps)
            index = b.add(at, first)
            e.store(b.fadd(e.load(out, index, tail), q) if add else q, out, index, tail)

        e.groups(n, body)

    return unpack_codes


unpack_bits, unpack_bits_add = _unpack_bits(add=False), _unpack_bits(add=True)
pack_codes_2, pack_codes_4, pack_codes_8 = map(_pack_codes, (2, 4, 8))
unpack_codes_2, unpack_codes_4, unpack_codes_8 = (_unpack_codes(b, False) for b in (2, 4, 8))
unpack_codes_2_add, unpack_codes_4_add, unpack_codes_8_add = (
    _unpack_codes(b, True) for b in (2, 4, 8)
)
