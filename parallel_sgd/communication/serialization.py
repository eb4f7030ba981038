"""Encode plain Python values as bytes for messages between ranks.

Nothing is pickled, and nothing is executed. MessagePack has None, booleans, numbers, texts, bytes,
lists and mappings. Other types have a tag here: tuples arrive as tuples, integers have any size,
NumPy arrays and numbers keep their dtype. Dataclasses registered by `message` are sent field by
field. Types without a tag are refused by the sender. Everything
here is local.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np

from ..errors import NotFinite, SharedProblem, UserError
from ..validation import kind_of, line_of

DEEPEST = 32  #: most levels of nested tuples, sets and keys

KNOWN = (
    "None, bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, Path, and "
    "NumPy's arrays and numbers"
)

_LIKE: dict[type, type] = {np.memmap: np.ndarray, type(Path()): Path}

_COMPLEX = struct.Struct("<dd")

_Read = Callable[[bytes, int], Any]  #: decodes the content of a tag, at a nesting depth

MessageT = TypeVar("MessageT")

_MESSAGES: dict[str, Any] = {}  #: registered dataclasses by name


BEGINS_WITH = 1 << 10
"""Initial buffer in bytes, grown as needed. The library's default is 256 KiB for every call."""


def packed(item: Any) -> bytes:
    """Encode a value as bytes.

    Args:
        item: any type of `KNOWN`, also nested. Subclasses are refused: an OrderedDict would arrive
            as a dict.
    Raises:
        UserError: the value is, or contains, another type.
    """
    try:
        return _packed(item, 0)
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"a value cannot be sent to other ranks: {line_of(error)}") from None


def unpacked(data: bytes | bytearray) -> Any:
    """Decode a value from `packed`. Arrays are new and writable.

    Raises:
        UserError: the bytes are invalid.
    """
    try:
        return _unpacked(data, 0)
    except Exception as error:  # invalid bytes raise many types
        raise UserError(
            "a message from another rank is damaged, or of another version of parallel_sgd: "
            f"{line_of(error)}"
        ) from None


def _packed(item: Any, depth: int) -> bytes:
    if depth > DEEPEST:
        raise UserError(
            f"a value for other ranks has tuples, sets or keys more than {DEEPEST} levels deep"
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
    """Decode up to `DEEPEST` levels, like `_packed`: each level uses C's stack."""
    if depth > DEEPEST:
        raise ValueError(f"it has tuples, sets or keys more than {DEEPEST} levels deep")
    return msgpack.unpackb(
        data,
        ext_hook=partial(_untagged, depth=depth + 1),
        strict_map_key=False,
        unicode_errors="surrogatepass",
    )


def message(kind: type[MessageT]) -> type[MessageT]:
    """Register a dataclass: its instances may be sent to other ranks. A class decorator.

    Fields are sent by their names, with values of any type that can be sent.
    """
    _MESSAGES[kind.__name__] = kind
    return kind


def _message_packed(item: Any, depth: int) -> bytes:
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    return _packed([type(item).__name__, values], depth)


def _message(data: bytes, depth: int) -> Any:
    name, values = _unpacked(data, depth)
    kind = _MESSAGES[name]
    if values.keys() != {field.name for field in fields(kind)}:
        raise ValueError(f"{name} has the fields {[*values]}")
    return kind(**values)


def _tagged(item: Any, depth: int) -> Any:
    """Encode a type unknown to MessagePack as a tagged value."""
    kind = type(item)
    if _MESSAGES.get(kind.__name__) is kind:
        return msgpack.ExtType(_MESSAGE_TAG, _message_packed(item, depth))
    if isinstance(item, np.generic):
        return _ext(np.generic, _array_packed(np.asarray(item), depth))
    kind = _LIKE.get(kind, kind)
    if kind not in _TAGS:
        raise UserError(
            f"{kind_of(item)} cannot be sent to other ranks: send {KNOWN}, alone or nested"
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


#: For each type: number of its tag, encoder, decoder.
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

_MESSAGE_TAG = 11

_READS = {tag: read for tag, _, read in _TAGS.values()} | {_MESSAGE_TAG: _message}
