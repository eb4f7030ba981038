"""What options must be like: each function returns the option as a plain Python value, or refuses.

Plain values have one `repr`, whatever the user wrote (0.1 or ``np.float64(0.1)``, a mapping in any
order): that is what ranks compare, and what files keep. Everything here is local.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from .errors import UserError

Value = TypeVar("Value")

LARGEST = float(np.finfo(np.float32).max)
"""Options meet float32 arrays: beyond this they would be infinite there."""

SMALLEST = float(np.finfo(np.float32).tiny)
"""Below this they would be zero there, or lose their precision."""


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an argument as an int.

    Raises:
        UserError: it is not a whole number of an integer type, or out of range.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least or (most is not None and found > most):
        required = f", at least {least}" if most is None else f" from {least} to {most}"
        raise UserError(f"{name}={shown(value)} must be a whole number{required}")
    return found


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
        may_vanish: whether it may be 0 in float32 though it is not here.
    Raises:
        UserError: it is not a real number, not finite, or out of range, or it is so in float32; or
            it vanishes there.
    """
    found = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            found = float(value) + 0.0  # -0.0 becomes 0.0
        except OverflowError:
            found = math.inf
    largest = LARGEST if most is None else most
    vanishes = 0 < found < SMALLEST and not may_vanish
    reaches = below is not None and not np.float32(min(found, LARGEST)) < below
    if not least <= found <= largest or vanishes or reaches:
        required = f", at least {least}" + ("" if below is None else f" and less than {below}")
        required += "" if most is None else f" and at most {most}"
        if LARGEST < found < math.inf or (found >= least and (vanishes or reaches)):
            required += ", also in float32"
        raise UserError(f"{name}={shown(value)} must be a finite number{required}")
    return found


def choice(name: str, value: Any, choices: Sequence[Value]) -> Value:
    """Return the one of `choices` that an argument is; True is not 1, nor is 1.0.

    Raises:
        UserError: it is none of them.
    """
    plain = value.item() if isinstance(value, np.generic) else value
    for each in choices:
        alike = isinstance(plain, type(each)) and isinstance(plain, bool) == isinstance(each, bool)
        if alike and plain == each:
            return each
    texts = [repr(each) for each in choices]
    required = " or ".join(texts) if len(texts) == 2 else "one of " + ", ".join(texts)
    raise UserError(f"{name}={shown(value)} must be {required}")


class Points(Mapping[int, Value]):
    """A mapping from samples to values that stays as it is, in the order of the samples.

    Equal to a dict of the same, and unlike it hashable.
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
    """Return a mapping from samples to values as `Points`: a copy, which nobody changes.

    Args:
        check: given a name and a value, returns it as a plain value or raises a UserError.
    Raises:
        UserError: it is not a mapping, does not begin at 0, or a number of samples or a value is
            not possible.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{name}={shown(values)} must be a mapping from samples to values")
    found = {
        integer(f"{name}: samples", samples, 0): check(f"{name}[{shown(samples)}]", value)
        for samples, value in values.items()
    }
    if 0 not in found:
        raise UserError(f"{name}={shown(dict(values))} must begin at 0 samples")
    return Points(found)


def settle(options: object, **values: Any) -> None:
    """Put checked values into a frozen dataclass, from its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(options, name, value)


def shown(value: Any) -> str:
    """A value as errors show it: in one line, not too long."""
    plain = isinstance(value, Real) and not isinstance(value, bool)
    text = " ".join((str(value) if plain else repr(value)).split())
    return text if len(text) <= 100 else text[:97] + "..."


def kind_of(value: Any) -> str:
    """The name of a value's class, as errors show it."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"a {module}{kind.__qualname__}"


def checked_path(name: str, path: Any) -> Path:
    """A folder's path, as it was given.

    Raises:
        UserError: it is none.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UserError(f"{name}={path!r} must be the path of a folder")
    return Path(path)


def check_counts(saved: Mapping[str, Any], where: str) -> None:
    """See that the numbers of a saved state, by field, are finite and at least 0. Local.

    Raises:
        UserError: naming the one that is not.
    """
    for name, value in saved.items():
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise UserError(f"{where}.{name}={shown(value)} must be a finite number, at least 0")
