"""Plain Python values as bytes, for other ranks. Nothing is pickled, and nothing is executed.

MessagePack has None, booleans, numbers, texts, bytes, lists and mappings. What it lacks has a tag
of its own here: tuples arrive as tuples, integers of any size as they are, NumPy's arrays and
numbers with their dtype. What has no tag is refused where it is sent. Everything here is local.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ..errors import NotFinite, SharedProblem, UserError
from ..validation import kind_of, line_of

DEEPEST = 32  #: that tuples, sets and the like may lie in each other

KNOWN = (
    "None, bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, Path, and "
    "NumPy's arrays and numbers"
)

_LIKE: dict[type, type] = {np.memmap: np.ndarray, type(Path()): Path}

_COMPLEX = struct.Struct("<dd")

_Read = Callable[[bytes, int], Any]  #: of what is in a tag, so many tags deep


BEGINS_WITH = 1 << 10
"""Bytes of room; more is taken as it is needed. The library's own are 256 KiB for every call."""


def packed(item: Any) -> bytes:
    """A value as bytes.

    Args:
        item: any of `KNOWN`, also in each other. Their subclasses are others: an OrderedDict would
            arrive as a dict.
    Raises:
        UserError: it is, or holds, something else.
    """
    try:
        return _packed(item, 0)
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"what is sent to other ranks cannot be: {line_of(error)}") from None


def unpacked(data: bytes | bytearray) -> Any:
    """The value that `packed` has made bytes of. An array is a new one, which can be written to.

    Raises:
        UserError: they are of no value.
    """
    try:
        return _unpacked(data, 0)
    except Exception as error:  # of the library, or of what is in a tag: of many kinds
        raise UserError(
            "what another rank has sent is damaged, or of another version of parallel_sgd: "
            f"{line_of(error)}"
        ) from None


def _packed(item: Any, depth: int) -> bytes:
    if depth > DEEPEST:
        raise UserError(
            f"what is sent to other ranks holds tuples, sets or keys more than {DEEPEST} deep"
        )
    tagged = partial(_tagged, depth=depth + 1)
    data: bytes = msgpack.packb(
        item,
        default=tagged,
        strict_types=True,
        unicode_errors="surrogatepass",
        buf_size=BEGINS_WITH,
    )
    return data


def _unpacked(data: bytes | bytearray, depth: int) -> Any:
    """Counts as `_packed` does: each level takes C's stack, and its end would be the process's."""
    if depth > DEEPEST:
        raise ValueError(f"it holds tuples, sets or keys more than {DEEPEST} deep")
    return msgpack.unpackb(
        data,
        ext_hook=partial(_untagged, depth=depth + 1),
        strict_map_key=False,
        unicode_errors="surrogatepass",
    )


def _tagged(item: Any, depth: int) -> Any:
    """What MessagePack does not have."""
    kind = type(item)
    if isinstance(item, np.generic):
        return _ext(np.generic, _array_packed(np.asarray(item), depth))
    kind = _LIKE.get(kind, kind)
    if kind not in _TAGS:
        raise UserError(
            f"{kind_of(item)} cannot be sent to other ranks: send {KNOWN}, alone or in each other"
        )
    return _ext(kind, _TAGS[kind][1](item, depth))


def _ext(kind: type, data: bytes) -> Any:
    return msgpack.ExtType(_TAGS[kind][0], data)


def _untagged(tag: int, data: bytes, depth: int) -> Any:
    if tag not in _READS:
        raise ValueError(f"tag {tag} is not known")
    return _READS[tag](data, depth)


def _array_packed(array: Any, depth: int) -> bytes:
    if array.dtype.hasobject:
        raise UserError("a NumPy array of objects cannot be sent to other ranks")
    described = np.lib.format.dtype_to_descr(array.dtype), array.shape
    return _packed([*described, array.tobytes()], depth)


def _array(data: bytes, depth: int) -> Any:
    described, shape, values = _unpacked(data, depth)
    dtype = np.lib.format.descr_to_dtype(described)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    return np.frombuffer(values, dtype).reshape(shape).copy()


def _integer_packed(item: int, depth: int) -> bytes:
    return item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True)


def _text(kind: Callable[[str], Any]) -> _Read:
    return lambda data, _: kind(data.decode(errors="surrogatepass"))


def _text_packed(item: Any, depth: int) -> bytes:
    return str.encode(os.fspath(item), errors="surrogatepass")


def _values_packed(items: Any, depth: int) -> bytes:
    return _packed([*items], depth)


def _values(kind: Callable[[list[Any]], Any]) -> _Read:
    return lambda data, depth: kind(_unpacked(data, depth))


#: The number of each tag, how its bytes are made, and what is made of them.
_TAGS: dict[type, tuple[int, Callable[[Any, int], bytes], _Read]] = {
    tuple: (1, _values_packed, _values(tuple)),
    set: (2, _values_packed, _values(set)),
    frozenset: (3, _values_packed, _values(frozenset)),
    int: (4, _integer_packed, lambda data, _: int.from_bytes(data, "little", signed=True)),
    complex: (
        5,
        lambda item, _: _COMPLEX.pack(item.real, item.imag),
        lambda data, _: complex(*_COMPLEX.unpack(data)),
    ),
    np.ndarray: (6, _array_packed, _array),
    np.generic: (7, _array_packed, lambda data, depth: _array(data, depth)[()]),
    Path: (8, _text_packed, _text(Path)),
    SharedProblem: (9, _text_packed, _text(SharedProblem)),
    NotFinite: (10, _text_packed, _text(NotFinite)),
}

_READS = {tag: read for tag, _, read in _TAGS.values()}
