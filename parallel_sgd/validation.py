"""Validation of options: each function returns the option as a plain Python value, or refuses.

Plain values have one `repr`, whatever the user wrote (0.1 or ``np.float64(0.1)``, a mapping in any
order): ranks compare this `repr`, and files keep it. Everything here is local.
"""

from __future__ import annotations

import errno
import math
import operator
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError

Value = TypeVar("Value")

LARGEST = (2 - 2**-23) * 2.0**127
"""Largest float32: options meet float32 arrays, and a larger number would be infinite there."""

SMALLEST = 2.0**-126
"""Smallest normal float32: a smaller number would be zero there, or lose precision."""

LARGEST_INTEGER = (1 << 63) - 1  #: in arrays and messages

PATH = re.compile(r"""\b(?:Pure)?(?:Posix|Windows)Path\(('[^']*'|"[^"]*")\)""")

BOTH = (True, False)  #: values of a switch

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Addresses in Python's text for functions and objects: different in every process."""

_FLOAT32 = struct.Struct("f")

NUMBERS = "biuf"  #: kinds of dtypes with plain real numbers


def integer(name: str, value: Any, least: int, most: int | None = None, *, bits: int = 63) -> int:
    """Return an argument as an int.

    Args:
        bits: most bits, as arrays and messages hold; random generators take more.
    Raises:
        UserError: not a whole number of an integer type, or out of range.
    """
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    largest = (1 << bits) - 1 if most is None else most
    if whole is None or not least <= whole <= largest:
        required = f", at least {least}" if most is None else f" from {least} to {most}"
        if most is None and whole is not None and whole > largest:
            required += f" and less than 2**{bits}"
        raise UserError(f"{name}={shown(value)} must be a whole number{required}")
    return whole


def checked_seed(value: Any) -> int:
    """Return a seed, of up to the length of NumPy's seeds from the system.

    Raises:
        UserError: not a whole number, or below 0.
    """
    return integer("seed", value, 0, bits=1024)


def number(
    name: str,
    value: Any,
    least: float,
    below: float | None = None,
    most: float | None = None,
    *,
    may_vanish: bool = False,
) -> float:
    """Return an argument as a float.

    Args:
        may_vanish: allow a positive number that is 0 in float32.
    Raises:
        UserError: not a real number, not finite, or out of range, here or in float32; or zero in
            float32 only.
    """
    real = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            real = float(value) + 0.0  # -0.0 becomes 0.0
        except OverflowError:
            real = math.inf
    largest = LARGEST if most is None else most
    vanishes = 0 < real < SMALLEST and not may_vanish
    reaches = below is not None and not _in_float32(real) < below
    if not least <= real <= largest or vanishes or reaches:
        required = f", at least {least}" + ("" if below is None else f" and less than {below}")
        required += "" if most is None else f" and at most {most}"
        if LARGEST < real < math.inf or (real >= least and (vanishes or reaches)):
            required += ", also in float32"
        raise UserError(f"{name}={shown(value)} must be a finite number{required}")
    return real


def _in_float32(real: float) -> float:
    """Return the nearest float32 to a real number; beyond the range of float32, its last number."""
    nearest: float = _FLOAT32.unpack(_FLOAT32.pack(min(max(real, -LARGEST), LARGEST)))[0]
    return nearest


def choice(name: str, value: Any, choices: Sequence[Value]) -> Value:
    """Return the element of `choices` equal to an argument.

    True is not 1. 1.0 is 1 if `choices` contain a float.

    Raises:
        UserError: the argument is not among the choices.
    """
    import numpy as np  # imported here: launchers have no such argument, and need no NumPy

    plain = value.item() if isinstance(value, np.generic) else value
    fractions = any(isinstance(one, float) for one in choices)
    for one in choices:
        alike = isinstance(plain, (int, float) if fractions else type(one))
        if alike and isinstance(plain, bool) == isinstance(one, bool) and plain == one:
            return one
    texts = [repr(one) for one in choices]
    required = " or ".join(texts) if len(texts) == 2 else "one of " + ", ".join(texts)
    raise UserError(f"{name}={shown(value)} must be {required}")


def instance(name: str, value: Value, kind: type[Any], example: str) -> Value:
    """Return an argument that is an instance of a class.

    Args:
        example: a valid expression, for the error.
    Raises:
        UserError: not an instance.
    """
    if not isinstance(value, kind):
        raise UserError(
            f"{name} must be an instance of {kind.__name__}, such as {example}: it is "
            f"{kind_of(value)}"
        )
    return value


def function(name: str, value: Any, what: str) -> Any:
    """Return an argument that is a function.

    Args:
        what: the function's arguments, as "of a batch".
    Raises:
        UserError: not callable; or a class, in place of an instance.
    """
    if not callable(value) or isinstance(value, type):
        raise UserError(f"{name} must be a function {what}: it is {kind_of(value)}")
    return value


def text(name: str, value: Any) -> str:
    """Return an argument that is a text.

    Raises:
        UserError: not a text.
    """
    if not isinstance(value, str):
        raise UserError(f"{name}={shown(value)} must be a text")
    return value


def mapping(
    name: str, value: Any, what: str = "values", *, optional: bool = True
) -> dict[str, Any]:
    """Return a mapping from names as a dict; an empty one for None.

    Args:
        what: kind of the values, for the error.
        optional: allow None.
    Raises:
        UserError: not a mapping from names.
    """
    if value is None and optional:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{name}={shown(value)} must be a mapping from names to {what}")
    return dict(value)


def one_number(name: str, value: Any) -> Any:
    """Return an argument unchanged if it is a number or an array of one value. An array on a GPU is
    not waited for. The number need not be finite.

    Raises:
        UserError: not a single number.
    """
    number_like = hasattr(value, "__float__") and not isinstance(value, type)
    if not number_like or math.prod(getattr(value, "shape", ())) != 1:
        raise UserError(f"{name}={shown(value)} must be one number")
    return value


class Points(Mapping[int, Value]):
    """An immutable mapping from samples to values, in the order of the samples.

    Equal to a dict with the same items, and unlike a dict hashable.
    """

    def __init__(self, points: Mapping[int, Value]) -> None:
        self._points = dict(sorted(points.items(), key=lambda point: point[0]))

    def __getitem__(self, samples: int) -> Value:
        return self._points[samples]

    def __iter__(self) -> Iterator[int]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)

    def __hash__(self) -> int:
        return hash(tuple(self._points.items()))

    def __repr__(self) -> str:
        return repr(self._points)


def points(name: str, values: Any, check: Callable[[str, Any], Value]) -> Points[Value]:
    """Return a mapping from samples to values as `Points`: an immutable copy.

    Args:
        check: given a name and a value, returns the plain value or raises a UserError.
    Raises:
        UserError: not a mapping, without a point at 0, or a number of samples or a value is
            invalid.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{name}={shown(values)} must be a mapping from samples to values")
    checked = {
        integer(f"{name}: samples", samples, 0): check(f"{name}[{shown(samples)}]", value)
        for samples, value in values.items()
    }
    if 0 not in checked:
        raise UserError(f"{name}={shown(dict(values))} must begin at 0 samples")
    return Points(checked)


def require_use(name: str, value: Any, default: Any, used: bool, needs: str) -> None:
    """Check that a given option has an effect.

    Args:
        default: of the option: a default value needs no effect.
        used: True if the other given options make this one effective.
        needs: options needed for an effect.
    Raises:
        UserError: the option has no effect.
    """
    if not used and value != default:
        raise UserError(f"{name}={shown(value)} has no effect without {needs}")


def require_memory(name: str, size: int) -> None:
    """Check that `size` bytes would fit into this machine's memory, if nothing else were there.

    Linux promises more memory than it has, and kills the process that uses the promise. Local.

    Raises:
        UserError: the bytes do not fit.
    """
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > there:
        raise UserError(f"{name} needs {size:,} bytes, but this machine's memory has {there:,}")


def set_validated(options: object, **values: Any) -> None:
    """Set validated values in a frozen dataclass, from its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def shown(value: Any) -> str:
    """Return a value as text for errors: in one line, at most 100 characters, the same on all
    ranks."""
    plain = isinstance(value, Real) and not isinstance(value, bool)
    try:
        text = " ".join((str(value) if plain else with_plain_paths(repr(value))).split())
    except ValueError:  # Python converts at most some thousand digits to text
        text = f"<{kind_of(value)}, too long to show>"
    text = ADDRESS.sub("", text)
    return text if len(text) <= 100 else text[:97] + "..."


def with_plain_paths(text: str) -> str:
    """Return a `repr` with each path in it as a text: 'a/b' for PosixPath('a/b')."""
    return PATH.sub(r"\1", text)


def kind_of(value: Any) -> str:
    """Return the kind of a value for errors: "a list", "None", or "the class SGD"."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if value is None:
        return "None"
    kind = type(value)
    return with_article(f"{kind.__module__}.{kind.__qualname__}".replace("builtins.", ""))


def with_article(name: str) -> str:
    """Return the name of a class after "a" or "an"."""
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"  # a UniformLevels


def line_of(error: BaseException) -> str:
    """Return an exception's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def checked_path(name: str, path: Any, what: str = "folder") -> Path:
    """Return a path as given.

    Args:
        what: the kind of file, for the error.
    Raises:
        UserError: not a valid path.
    """
    required = f"{name}={shown(path)} must be the path of a {what}"
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UserError(required)
    if "\0" in os.fsdecode(path):
        raise UserError(f"{required}: it has a zero byte")
    try:
        os.stat(path)
    except UnicodeEncodeError:
        raise UserError(f"{required}: it has characters that no name of a file has") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # any later use would fail, too
            raise UserError(f"{required}: {error.strerror}") from None
    return Path(os.fsdecode(path))
