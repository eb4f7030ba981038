"""The vector code of one of 8, 16 or 32 values, for full blocks.

A full block is a table of `group` rows and 1024 / group columns, and a lane has one value of each
row, rotated from row to row. What is known of the lanes stays in registers, as vectors that follow
the columns of the present row, and rotates with them. So both passes go over the rows in the order
of memory: the first leaves v = g + r in r and finds the largest magnitude of every lane, the second
finds where that is, and leaves v - q there.

The bytes are those of `reference.encode_one_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .blocks import GROUP
from .emitter import FLOAT, I8, I32, I32X32, I64, Emitter, How, Value, every_lane, vector_function
from .reference import ROTATION, SMALLEST_LARGEST, nothing, place_shift

FULL = 1024  #: values in a block for which there is vector code

_EVERY_BIT = 0xFFFFFFFF


class Lanes:
    """Vectors that hold a number for every lane, in the order of the columns of some row."""

    def __init__(self, e: Emitter, vectors: Sequence[Value]) -> None:
        self._e = e
        self._places = [cgutils.alloca_once_value(e.b, vector) for vector in vectors]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Value]:
        return (self[column] for column in range(len(self)))

    def __getitem__(self, column: int) -> Value:
        return self._e.b.load(self._places[column], typ=I32X32)

    def __setitem__(self, column: int, vector: Value) -> None:
        self._e.b.store(vector, self._places[column])

    def rotate(self, columns: int) -> None:
        """So many columns to the right, and from the last on to the first."""
        old = list(self)
        for number in range(len(self)):
            first, inside = divmod((number * GROUP - columns) % (len(self) * GROUP), GROUP)
            mask = I32X32(list(range(inside, inside + GROUP)))
            self[number] = self._e.b.shuffle_vector(old[first], old[(first + 1) % len(old)], mask)


def _each_row(
    e: Emitter, group: int, at: Value, body: Callable[[Value, int, Value], None], *lanes: Lanes
) -> None:
    """Emit `body(index, column, row)` for each 32 values of every row, with the lanes rotated."""
    columns = FULL // group
    with cgutils.for_range(e.b, I64(group)) as loop:
        begin = e.b.add(at, e.b.mul(loop.index, I64(columns)))
        for column in range(columns // GROUP):
            body(e.b.add(begin, I64(column * GROUP)), column, loop.index)
        for each in lanes:
            each.rotate(ROTATION)
    for each in lanes:  # back to where the first row has them
        each.rotate(-ROTATION * group)


def _encode_full(group: int) -> Any:
    count, none = FULL // group // GROUP, nothing(group)

    @vector_function("g", "r", "payload", "int", "int")
    def encode_full(e: Emitter, g: Value, r: Value, payload: Value, at: Value, byte: Value) -> None:
        b = e.b
        largest = Lanes(e, [every_lane(0)] * count)

        def correct(index: Value, column: int, row: Value) -> None:
            v = e.correct(g, r, index, None)
            largest[column] = e.larger(e.words(e.absolute(v)), largest[column])

        _each_row(e, group, at, correct, largest)

        # s = the largest of all;  c = round(log2(s / m));  q = s * 2**-c, all in their bits
        s = e.splat(e.largest_lane(list(largest)))
        known = b.icmp_unsigned(">=", s, every_lane(int(SMALLEST_LARGEST.view("u4"))))
        levels, codes = Lanes(e, [every_lane(0)] * count), Lanes(e, [every_lane(0)] * count)
        for column, m in enumerate(largest):
            c = b.lshr(b.add(b.sub(s, m), every_lane(1 << 22)), every_lane(23))
            sent = b.and_(
                b.icmp_unsigned("<", c, every_lane(none)), b.icmp_unsigned("!=", m, every_lane(0))
            )
            sent = b.and_(sent, known)
            levels[column] = b.sub(s, b.shl(c, every_lane(23)))
            codes[column] = b.select(sent, c, every_lane(none))
            largest[column] = b.select(sent, m, every_lane(_EVERY_BIT))  # which no magnitude equals

        def subtract(index: Value, column: int, row: Value) -> None:
            v = e.load(r, index, None)
            word = e.words(v)
            sign = e.mask(word, 1 << 31)
            found = b.icmp_unsigned("==", e.mask(word, 0x7FFFFFFF), largest[column])
            q = e.floats(b.or_(levels[column], sign))
            e.store(b.select(found, b.fsub(v, q), v), r, index, None)
            place = e.splat(b.trunc(b.shl(row, I64(place_shift(group))), I32))
            code = b.or_(b.or_(codes[column], b.lshr(sign, every_lane(24))), place)
            codes[column] = b.select(found, code, codes[column])
            largest[column] = b.select(found, every_lane(_EVERY_BIT), largest[column])
            e.fetch(g, b.add(index, I64(FULL)))

        _each_row(e, group, at, subtract, largest, levels, codes)

        e.vector_store(b.extract_element(s, I32(0)), e.place(payload, byte, I8), 4)
        for column, code in enumerate(codes):
            place = e.place(payload, b.add(byte, I64(4 + column * GROUP)), I8)
            e.vector_store(b.trunc(code, ir.VectorType(I8, GROUP)), place, 4)

    return encode_full


def _read(
    e: Emitter, group: int, payload: Value, byte: Value, column: int
) -> tuple[Value, Value, Value]:
    """Of 32 lanes: which have sent a value, of which row, and the bits of that value."""
    b, none = e.b, nothing(group)
    s = e.splat(e.vector_load(e.place(payload, byte, I8), I32, 4))
    place = e.place(payload, b.add(byte, I64(4 + column * GROUP)), I8)
    code = b.zext(e.vector_load(place, ir.VectorType(I8, GROUP), 4), I32X32)
    c, sign = e.mask(code, none), b.shl(e.mask(code, 0x80), every_lane(24))
    row = e.mask(b.lshr(code, every_lane(place_shift(group))), group - 1)
    return (
        b.icmp_unsigned("!=", c, every_lane(none)),
        row,
        b.or_(b.sub(s, b.shl(c, every_lane(23))), sign),
    )


def _decode_full(group: int, how: How) -> Any:
    count = FULL // group // GROUP

    @vector_function("payload", "out", "int", "int")
    def decode_full(e: Emitter, payload: Value, out: Value, byte: Value, at: Value) -> None:
        """out = q, row by row"""
        b = e.b
        rows, values = Lanes(e, [every_lane(0)] * count), Lanes(e, [every_lane(0)] * count)
        for column in range(count):
            sent, rows[column], q = _read(e, group, payload, byte, column)
            values[column] = b.select(sent, q, every_lane(0))

        def write(index: Value, column: int, row: Value) -> None:
            here = b.icmp_unsigned("==", rows[column], e.splat(b.trunc(row, I32)))
            q = e.floats(b.select(here, values[column], every_lane(0)))
            e.put(q, out, index, None, how)

        _each_row(e, group, at, write, rows, values)

    return decode_full


def _add_full(group: int) -> Any:
    columns = FULL // group

    @vector_function("payload", "out", "int", "int")
    def add_full(e: Emitter, payload: Value, out: Value, byte: Value, at: Value) -> None:
        """out += q where something was sent"""
        b, block = e.b, e.place(out, at, FLOAT)
        for column in range(columns // GROUP):
            sent, row, q = _read(e, group, payload, byte, column)
            lane = I32X32(list(range(column * GROUP, (column + 1) * GROUP)))
            turned = e.mask(b.add(lane, b.mul(row, every_lane(ROTATION))), columns - 1)
            place = b.add(b.mul(row, every_lane(columns)), turned)
            e.scatter(b.fadd(e.gather(block, place, sent), e.floats(q)), block, place, sent)

    return add_full


encode_full_8, encode_full_16, encode_full_32 = map(_encode_full, (8, 16, 32))
decode_full_8, decode_full_16, decode_full_32 = (_decode_full(g, How.SET) for g in (8, 16, 32))
stream_full_8, stream_full_16, stream_full_32 = (_decode_full(g, How.STREAM) for g in (8, 16, 32))
add_full_8, add_full_16, add_full_32 = map(_add_full, (8, 16, 32))
