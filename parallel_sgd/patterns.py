"""Values for some parameters, selected by name patterns or by size. Everything is local."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from .errors import UserError
from .validation import kind_of, shown

Value = TypeVar("Value")

SHOWN = 30  #: names in an error, at most


class Patterns(Mapping[str, Value]):
    """An immutable mapping from patterns to values, in the given order.

    Patterns are the shell's: ``*``, ``?``, ``[ab]`` and ``[!ab]``, for a whole name,
    case-sensitive. A name always matches itself, even with special characters. ``<N`` matches
    parameters of fewer than N values. The first matching pattern counts.

    Equal to a mapping with the same items in the same order, and unlike a dict hashable.
    """

    def __init__(self, patterns: Mapping[str, Value]) -> None:
        self._patterns = dict(patterns)

    def __getitem__(self, pattern: str) -> Value:
        return self._patterns[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._patterns)

    def __len__(self) -> int:
        return len(self._patterns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and [*self.items()] == [*other.items()]

    def __hash__(self) -> int:
        return hash(tuple(self._patterns.items()))

    def __repr__(self) -> str:
        return repr(self._patterns)

    def matching(self, name: str, size: int) -> str | None:
        """Return the first pattern matching a parameter of `size` values; None without a match."""
        return next((pattern for pattern in self if _matches(pattern, name, size)), None)

    def value_of(self, name: str, size: int) -> Value | None:
        """Return the value for a parameter; None without a match."""
        pattern = self.matching(name, size)
        return None if pattern is None else self[pattern]

    def require_matches(self, option: str, sizes: Mapping[str, int]) -> None:
        """Check that every pattern counts for some parameter.

        Args:
            option: its name.
            sizes: of all parameters, by name.
        Raises:
            UserError: a pattern counts for no parameter; names the pattern and parameters.
        """
        counting = {self.matching(name, size) for name, size in sizes.items()}
        for pattern in self:
            if pattern in counting:
                continue
            own = [name for name, size in sizes.items() if _matches(pattern, name, size)]
            if own:
                raise UserError(
                    f"{option}: {pattern!r} has no effect: patterns before it match all that it "
                    f"does: {_listed(own)}"
                )
            raise UserError(
                f"{option}: {pattern!r} matches no parameter of "
                + _listed([f"{name} ({size} values)" for name, size in sizes.items()])
            )


def patterns(name: str, values: Any, check: Callable[[str, Any], Value]) -> Patterns[Value]:
    """Return a mapping from patterns to values as `Patterns`: an immutable copy.

    Args:
        check: given a name and a value, returns the plain value or raises a UserError.
    Raises:
        UserError: not a mapping, or a pattern or a value is invalid.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{name}={shown(values)} must be a mapping from patterns to values")
    for pattern in values:
        if not isinstance(pattern, str):
            raise UserError(
                f"{name}: pattern {shown(pattern)} must be a text: it is {kind_of(pattern)}"
            )
    return Patterns(
        {str(key): check(f"{name}[{shown(key)}]", value) for key, value in values.items()}
    )


def _matches(pattern: str, name: str, size: int) -> bool:
    below = re.fullmatch("<([0-9]{1,18})", pattern)
    if below:
        return size < int(below[1])
    return pattern == name or fnmatchcase(name, pattern)


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
