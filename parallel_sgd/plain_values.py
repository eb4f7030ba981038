"""Plain Python values as JSON, exactly: `from_json` returns an equal value of the same types.

JSON has only text keys, no tuples, and only finite numbers. So a value without an equivalent in
JSON becomes an object with a single name, a tag:

    {1: (2.5, nan)}    {"$dict": [[1, {"$tuple": [2.5, {"$float": "7ff8000000000000"}]}]]}

Supported are None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset,
dict, OrderedDict, Counter, deque, defaultdict (of a type in `FACTORIES`), NumPy's scalars and
arrays, and types added by `add_type`. A value of a subclass of these (an enum, a named tuple) would
lose its class, so it is refused. Several references to the same object come back as equal copies.
Nothing is pickled, and nothing in a document is executed. Everything here is local.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import UserError
from .validation import kind_of, shown

DEEPEST = 50
"""Most levels of nested values: Python's own limit would depend on the caller."""

LEVELS = 4 * DEEPEST
"""Most levels of a document: a value may be an object with a tag that contains lists of pairs."""

_on_host = ContextVar("on_host", default=False)

LONGEST_INTEGER = 64
"""Most bits of an integer written in decimal digits. Python reads at most 4,300 digits."""

DTYPE = re.compile(r"[<>|][biufcSUmM]\d+(\[\w+\])?")
"""dtypes with values given by their bytes, as NumPy writes the dtype."""

FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (dict, list, set, int, float, str)}
"""Allowed default factories of a defaultdict, by name."""

Place = tuple[Any, Any]
"""The place of a part in a value: the place of the containing value, and the key there. The place
of the value itself is (None, its name)."""


@dataclass(frozen=True)
class _Type:
    """Conversion of values of one type.

    Attributes:
        tag: in the document, without the "$".
        to_parts: returns a plain value to represent a value.
        from_parts: the inverse of `to_parts`; raises an error of any common type for invalid parts.
    """

    tag: str
    to_parts: Callable[[Any], Any]
    from_parts: Callable[[Any], Any]


def add_type(
    kind: type, tag: str, to_parts: Callable[[Any], Any], from_parts: Callable[[Any], Any]
) -> None:
    """Support values of one more type.

    Args:
        kind: the type itself: values of subclasses are refused.
        tag: a name for the type in documents.
        to_parts: returns a plain value to represent a value, or raises a UserError with the reason,
            as the end of a sentence.
        from_parts: the inverse of `to_parts`; may raise a UserError, TypeError or ValueError.
    """
    _TYPES[kind] = _BY_TAG[tag] = _Type(tag, to_parts, from_parts)


def to_json(name: str, value: Any) -> Any:
    """Return a value as a JSON document: new lists and dicts of finite numbers and texts.

    Args:
        name: the value's name in errors.
    Raises:
        UserError: the value or a part of it has an unsupported type, or is nested more than 50
            deep; the error names the part.
    """
    return _to_json((None, name), value, DEEPEST)


def from_json(document: Any, *, host: bool = False) -> Any:
    """Return the value of a document made by `to_json`.

    Args:
        host: place all values in host memory, even those from another device.
    Raises:
        UserError: not a document made by `to_json`.
    """
    token = _on_host.set(host)
    try:
        return _from_json(document, LEVELS)
    finally:
        _on_host.reset(token)


def on_host() -> bool:
    """Return True if the current value must be placed in host memory: for `from_parts`."""
    return _on_host.get()


def _to_json(place: Place, value: Any, depth: int) -> Any:
    if depth < 0:
        raise UserError(f"{_shown(place)} is nested more than {DEEPEST} deep, or contains itself")
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int and value.bit_length() <= LONGEST_INTEGER:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind is str and _is_unicode(value):
        return value
    if kind is list:
        return [_to_json((place, i), entry, depth - 1) for i, entry in enumerate(value)]
    if kind is dict and all(map(_is_name, value)):
        return {key: _to_json((place, key), entry, depth - 1) for key, entry in value.items()}
    if kind not in _TYPES and issubclass(kind, np.generic):
        kind = np.generic
    if kind not in _TYPES:
        raise UserError(
            f"{_shown(place)}={shown(value)} is {kind_of(value)}, which checkpoints cannot keep: "
            "values must be numbers, texts, bytes, lists, tuples, sets, dictionaries or arrays, "
            "not of a derived class (such as named tuples and enums): give the plain value, "
            "such as tuple(...) or int(...)"
        )
    plain = _TYPES[kind]
    if isinstance(value, Mapping):
        parts: Any = [
            [_to_json((place, key), part, depth - 1) for part in (key, entry)]
            for key, entry in value.items()
        ]
        if isinstance(value, defaultdict):
            parts = [_factory_name(place, value), *parts]
    else:
        try:
            parts = plain.to_parts(value)
        except UserError as error:
            raise UserError(f"{_shown(place)}={shown(value)} {error}") from None
        parts = _to_json(place, parts, depth)
    return {f"${plain.tag}": parts}


def _factory_name(place: Place, value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    for name, kind in FACTORIES.items():
        if factory is kind:
            return name
    raise UserError(
        f"{_shown(place)}={shown(value)} has a default that checkpoints cannot keep: it must be "
        f"{' or '.join(FACTORIES)}, or give dict(...)"
    )


def _shown(place: Place) -> str:
    """Return a place in a value as a Python expression."""
    keys = []
    while place[0] is not None:
        place, key = place
        keys.append(f"[{shown(key)}]")
    text: str = place[1] + "".join(reversed(keys))
    return text if len(text) <= 200 else text[:197] + "..."


def _from_json(document: Any, depth: int) -> Any:
    if depth < 0:
        raise UserError(f"is nested more than {LEVELS} deep")
    if isinstance(document, list):
        return [_from_json(entry, depth - 1) for entry in document]
    if not isinstance(document, dict):
        return document
    if not any(name.startswith("$") for name in document):
        return {name: _from_json(entry, depth - 1) for name, entry in document.items()}
    tag, parts = next(iter(document.items()))
    if len(document) > 1 or tag[1:] not in _BY_TAG:
        hint = ": PyTorch's, see parallel_sgd.torch" if tag[1:].startswith("torch.") else ""
        raise UserError(f"holds {shown(tag)}, which is not the tag of any type{hint}")
    try:
        return _BY_TAG[tag[1:]].from_parts(_from_json(parts, depth - 1))
    except UserError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, struct.error) as error:
        raise UserError(f"holds an invalid {tag}: {shown(str(error))}") from None


def _is_unicode(text: str) -> bool:
    """Return True if JSON preserves a text: two lone surrogates would become one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_name(key: Any) -> bool:
    return type(key) is str and not key.startswith("$") and _is_unicode(key)


def _from_hexadecimal(text: str) -> int:
    return int(text, 16)


def _float_of(text: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


def _complex_of(parts: list[float]) -> complex:
    real, imaginary = parts
    return complex(real, imaginary)


def _base64_of(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes_of(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _parts_of_array(array: Any) -> list[Any]:
    """Return dtype, shape and bytes of an array or a scalar, in C order."""
    dtype = array.dtype
    if not DTYPE.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype:
        raise UserError(f"has dtype {dtype}, which checkpoints cannot keep")
    return [dtype.str, list(array.shape), _base64_of(array.tobytes())]


def _array_of(parts: Any) -> Any:
    text, shape, data = parts
    if not DTYPE.fullmatch(text) or not isinstance(shape, list):
        raise ValueError(f"{shown(parts[:2])} are not the dtype and the shape of an array")
    dtype = np.dtype(text)
    content = bytearray(_bytes_of(data))  # writable
    if math.prod(shape) * dtype.itemsize != len(content) or any(length < 0 for length in shape):
        raise ValueError(f"an array of {shown(shape)} cannot have {len(content)} bytes")
    array = np.ndarray(shape, dtype, content)
    if dtype.kind == "b":
        _require_booleans(content)
    return array


def _require_booleans(content: bytes | bytearray) -> None:
    if max(content, default=0) > 1:
        raise ValueError("a truth value must be 0 or 1")


def _dict_of(pairs: list[list[Any]]) -> dict[Any, Any]:
    return dict(tuple(pair) for pair in pairs)


def _with_default(parts: list[Any]) -> defaultdict[Any, Any]:
    name, *pairs = parts
    return defaultdict(None if name is None else FACTORIES[name], _dict_of(pairs))


_TYPES: dict[type, _Type] = {}
_BY_TAG: dict[str, _Type] = {}

add_type(int, "int", hex, _from_hexadecimal)
add_type(float, "float", lambda value: struct.pack(">d", value).hex(), _float_of)
add_type(complex, "complex", lambda value: [value.real, value.imag], _complex_of)
add_type(
    str,
    "str",
    lambda text: _base64_of(text.encode(errors="surrogatepass")),
    lambda text: _bytes_of(text).decode(errors="surrogatepass"),
)
add_type(bytes, "bytes", _base64_of, _bytes_of)
add_type(bytearray, "bytearray", _base64_of, lambda text: bytearray(_bytes_of(text)))
add_type(tuple, "tuple", list, tuple)
add_type(set, "set", list, set)
add_type(frozenset, "frozenset", list, frozenset)
add_type(deque, "deque", lambda some: [list(some), some.maxlen], lambda parts: deque(*parts))
add_type(dict, "dict", list, _dict_of)
add_type(OrderedDict, "OrderedDict", list, lambda pairs: OrderedDict(_dict_of(pairs)))
add_type(defaultdict, "defaultdict", list, _with_default)
add_type(Counter, "Counter", list, lambda pairs: Counter(_dict_of(pairs)))
add_type(np.ndarray, "array", _parts_of_array, _array_of)
add_type(np.generic, "scalar", _parts_of_array, lambda parts: _array_of(parts)[()])
add_type(np.str_, "numpy.str", str, np.str_)
add_type(np.bytes_, "numpy.bytes", bytes, np.bytes_)
