"""Loads, stores and prefetches at plain addresses, for kernels on data in many pieces of memory.

No function checks anything or keeps memory alive: callers hold the arrays.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from .emitter import FLOAT, I8, I64
from .emitter import prefetch as emit_prefetch


@intrinsic
def address_of(context: Any, array: Any) -> Any:
    """Return the address of an array's data, as int64."""

    def generate(c: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = c.make_array(signature.args[0])(c, builder, values[0]).data
        return builder.ptrtoint(data, I64)

    return types.int64(array), generate


@intrinsic
def get_int(context: Any, address: Any) -> Any:
    """Return the int64 at an address."""

    def generate(c: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(builder.inttoptr(values[0], I64.as_pointer()), typ=I64)

    return types.int64(types.int64), generate


@intrinsic
def set_int(context: Any, address: Any, value: Any) -> Any:
    """Store an int64 at an address."""

    def generate(c: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[1], builder.inttoptr(values[0], I64.as_pointer()))
        return c.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def floats_at(context: Any, address: Any) -> Any:
    """Return an address as a pointer to float32, for `numba.carray`."""

    def generate(c: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Begin to load the cache line at any address."""

    def generate(c: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_prefetch(builder, builder.inttoptr(values[0], I8.as_pointer()))
        return c.get_dummy_value()

    return types.void(types.int64), generate
