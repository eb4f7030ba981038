"""The vector operations of the Numba kernels, as LLVM code.

Numba compiles a plain loop that packs bits to 0.5 G values/s. Written as operations on 32 values at
once (load <32 x float>, compare, bitcast <32 x i1> to i32, select, store), LLVM turns the same loop
into a compare-to-mask and a few masked instructions, on every processor it supports, and the loop
runs at the speed of memory. The 32 lanes are also the order of the sums: see `reference.lane_sum`.
`simd` holds the loops.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .blocks import GROUP
from .memory import LINE

I1, I8, I16, I32, I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
FLOAT = ir.FloatType()
F32X32 = ir.VectorType(FLOAT, GROUP)
I32X32 = ir.VectorType(I32, GROUP)

Value = Any  # an ir.Value


def vector_function(*argument_types: str, returns: types.Type = types.void) -> Any:
    """Make a Numba intrinsic of a function that emits code for one block.

    Args:
        argument_types: the kinds of the arguments. "int" becomes int64 and "float" float32; any
            other name is documentation, and the argument stays an array.
        returns: the type of the result.
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


def call(b: Any, name: str, returns: ir.Type, *arguments: Value) -> Value:
    """Call a function of LLVM by its name."""
    kind = ir.FunctionType(returns, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def prefetch(b: Any, pointer: Value, cache: int = 1) -> None:
    """Begin to load the cache line at a pointer to bytes into the cache of this level, 1 or 2."""
    read, data = I32(0), I32(1)
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, read, I32(4 - cache), data)


def every_lane(word: int) -> Value:
    """Return a vector with the same bits in all 32 lanes."""
    return I32X32([word] * GROUP)


class How(Enum):
    """The use of decoded values."""

    SET = "out = q"
    STREAM = "out = q, past the caches"
    ADD = "out += q"


class Emitter:
    """The vector operations of the kernels."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.b = context, builder

    def keep_apart(self) -> None:
        """Prevent LLVM from inlining this function into callers, whose registers it would need."""
        self.b.function.attributes.add("noinline")

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
        """Load 32 floats from `index`; in a tail, zeros after its end."""
        source = self.place(array, index, FLOAT)
        if tail is None:
            return self.vector_load(source, F32X32, 4)
        buffer = cgutils.alloca_once(self.b, F32X32)
        self.b.store(F32X32(None), buffer)
        self._copy(source, buffer, tail, FLOAT)
        return self.b.load(buffer, typ=F32X32)

    def store(
        self,
        value: Value,
        array: Value,
        index: Value,
        tail: Value | None,
        *,
        streaming: bool = False,
    ) -> None:
        """Store 32 elements of any type at `index`; in a tail, only those before its end.

        Args:
            streaming: True to bypass the caches: a store that does not read its cache line first.
                The address must be the start of a line.
        """
        element = value.type.element
        target = self.place(array, index, element)
        if tail is None and streaming:
            store = self.b.store(value, self.b.bitcast(target, value.type.as_pointer()), align=LINE)
            store.set_metadata("nontemporal", self.b.module.add_metadata([I32(1)]))
            return
        if tail is None:
            self.vector_store(value, target, element.width // 8 if element != FLOAT else 4)
            return
        buffer = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, buffer)
        self._copy(buffer, target, tail, element)

    def put(self, q: Value, out: Value, index: Value, tail: Value | None, how: How) -> None:
        """Store or add 32 decoded values."""
        if how is How.ADD:
            q = self.b.fadd(self.load(out, index, tail), q)
        self.store(q, out, index, tail, streaming=how is How.STREAM)

    def _copy(self, source: Value, target: Value, count: Value, element: ir.Type) -> None:
        with cgutils.for_range(self.b, count) as loop:
            value = self.b.load(self.place(source, loop.index, element), typ=element)
            self.b.store(value, self.place(target, loop.index, element))

    def bits(self, payload: Value, byte: Value) -> Value:
        """Load the 32 bits at a byte, one for each lane."""
        word = self.vector_load(self.place(payload, byte, I8), I32, 4)
        return self.b.bitcast(word, ir.VectorType(I1, GROUP))

    def fetch(self, array: Value, index: Value, count: int = GROUP, cache: int = 1) -> None:
        """Begin to load `count` floats into the first- or second-level cache.

        The floats may be beyond the end of the array.
        """
        for line in range(0, count, LINE // 4):
            place = self.place(array, self.b.add(index, I64(line)), FLOAT)
            prefetch(self.b, self.b.bitcast(place, I8.as_pointer()), cache)

    def correct(self, g: Value, r: Value, index: Value, tail: Value | None) -> Value:
        """Return v = g + r, and store v in r."""
        v = self.b.fadd(self.load(g, index, tail), self.load(r, index, tail))
        self.store(v, r, index, tail)
        return v

    def inside(self, tail: Value | None) -> Value:
        """Return <32 x i1>: the lanes with values."""
        if tail is None:
            return ir.VectorType(I1, GROUP)([1] * GROUP)
        lanes = I32X32(list(range(GROUP)))
        return self.b.icmp_unsigned("<", lanes, self.splat(self.b.trunc(tail, I32)))

    def splat(self, scalar: Value, count: int = GROUP) -> Value:
        kind = ir.VectorType(scalar.type, count)
        one = self.b.insert_element(kind(ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(
            one, kind(ir.Undefined), ir.VectorType(I32, count)([0] * count)
        )

    def lanes(self, vector: Value, first: int, count: int) -> Value:
        mask = ir.VectorType(I32, count)(list(range(first, first + count)))
        return self.b.shuffle_vector(vector, vector.type(ir.Undefined), mask)

    def join(self, low: Value, high: Value) -> Value:
        count = 2 * low.type.count
        return self.b.shuffle_vector(low, high, ir.VectorType(I32, count)(list(range(count))))

    def words(self, vector: Value) -> Value:
        """Return the bits of 32 floats."""
        return self.b.bitcast(vector, I32X32)

    def floats(self, words: Value) -> Value:
        return self.b.bitcast(words, F32X32)

    def mask(self, words: Value, mask: int) -> Value:
        return self.b.and_(words, I32X32([mask] * GROUP))

    def absolute(self, vector: Value) -> Value:
        return self.floats(self.mask(self.words(vector), 0x7FFFFFFF))

    def larger(self, a: Value, b: Value) -> Value:
        """Return the larger of unsigned words, by lane."""
        return self.b.select(self.b.icmp_unsigned(">", a, b), a, b)

    def largest_lane(self, word: Value) -> Value:
        """Return the largest of 32 unsigned words."""
        for half in (16, 8, 4, 2, 1):
            word = self.larger(self.lanes(word, 0, half), self.lanes(word, half, half))
        return self.b.extract_element(word, I32(0))

    def accumulator(self) -> Value:
        """Allocate 32 zeros to add to (LLVM keeps them in registers)."""
        place = cgutils.alloca_once(self.b, F32X32)
        self.b.store(F32X32(None), place)
        return place

    def add_to(self, accumulator: Value, vector: Value, where: Value | None = None) -> None:
        old = self.b.load(accumulator, typ=F32X32)
        new = self.b.fadd(old, vector)
        self.b.store(new if where is None else self.b.select(where, new, old), accumulator)

    def total(self, accumulator: Value) -> Value:
        """Return the sum of the 32 lanes, added by halves."""
        vector = self.b.load(accumulator, typ=F32X32)
        for half in (16, 8, 4, 2, 1):
            vector = self.b.fadd(self.lanes(vector, 0, half), self.lanes(vector, half, half))
        return self.b.extract_element(vector, I32(0))
