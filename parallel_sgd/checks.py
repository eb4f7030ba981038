"""Checks of option values: small objects that validate a value, and parse it from the command line.

Everything here is local.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import UserError
from .patterns import Patterns, patterns
from .validation import checked_path, choice, integer, number, points, shown


class Check(Protocol):
    """Validates the values of an option, and parses these from text."""

    @property
    def metavar(self) -> str:
        """Placeholder for a value on the command line: the choices, if there are any."""

    @property
    def expected(self) -> str:
        """Description of a valid text, for the error about an invalid one."""

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value as a plain value.

        Raises:
            UserError: the value is invalid; names the option.
        """

    def read(self, text: str) -> Any:
        """Parse a value from the command line, without checking its range.

        Raises:
            ValueError: the text is invalid.
        """


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most` (None: no limit)."""

    least: int = 0
    most: int | None = None
    metavar: str = "N"
    expected: str = "a whole number"

    def __call__(self, name: str, value: Any) -> int:
        return integer(name, value, self.least, self.most)

    def read(self, text: str) -> int:
        return int(text)


@dataclass(frozen=True)
class Real:
    """A finite number of at least `least` (more than 0 if `positive`), less than `below`, and at
    most `most`."""

    least: float = 0
    below: float | None = None
    most: float | None = None
    positive: bool = False
    metavar: str = "X"
    expected: str = "a number"

    def __call__(self, name: str, value: Any) -> float:
        if not self.positive:
            return number(name, value, self.least, below=self.below, most=self.most)
        try:
            checked = number(name, value, self.least, below=self.below, most=self.most)
        except UserError:
            checked = 0.0
        if not checked:
            limit = "" if self.most is None else f" and at most {self.most:g}"
            raise UserError(f"{name}={shown(value)} must be more than 0{limit}")
        return checked

    def read(self, text: str) -> float:
        return float(text)


class Choice:
    """One of several values."""

    expected = "one of its choices"

    def __init__(self, *values: Any) -> None:
        self._values = values

    @property
    def values(self) -> Sequence[Any]:
        """All choices."""
        return self._values

    @property
    def metavar(self) -> str:
        return " | ".join(map(_text, self.values))

    def __call__(self, name: str, value: Any) -> Any:
        return choice(name, value, self.values)

    def read(self, text: str) -> Any:
        """Return the choice with this text; if there is none and choices are numbers, a whole
        number."""
        for value in self.values:
            if _text(value) == text.lower():
                return value
        return int(text) if type(self.values[0]) in (int, float) and text.isdigit() else text


@dataclass(frozen=True)
class WholeOr:
    """A whole number of at least 1, or a word."""

    word: str

    @property
    def metavar(self) -> str:
        return f"N | {self.word}"

    @property
    def expected(self) -> str:
        return f"a whole number, or {self.word}"

    def __call__(self, name: str, value: Any) -> int | str:
        if isinstance(value, str) and value == self.word:
            return value
        try:
            return integer(name, value, 1)
        except UserError as error:
            raise UserError(f"{error}, or {self.word!r}") from None

    def read(self, text: str) -> int | str:
        return text if text == self.word else int(text)


@dataclass(frozen=True)
class BySamples:
    """A value valid for `value`, or a mapping from samples to such values (``{0: 32, 20_000: 1}``),
    or one of `words`."""

    value: Check
    words: tuple[str, ...] = ()

    @property
    def metavar(self) -> str:
        return " | ".join([self.value.metavar, "S:N,...", *self.words])

    @property
    def expected(self) -> str:
        words = "".join(f", or {word}" for word in self.words)
        return f"{self.value.expected}, or samples:value pairs as 0:32,20000:1{words}"

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return points(name, value, self.value)
        if isinstance(value, str) and value in self.words:
            return value
        try:
            return self.value(name, value)
        except UserError as error:
            others = ", or ".join(["values by samples (0:32,20000:1)", *self.words])
            raise UserError(f"{error}, or {others}") from None

    def read(self, text: str) -> Any:
        if ":" not in text:
            return text if text in self.words else self.value.read(text)
        return read_points(text, self.value)


@dataclass(frozen=True)
class ByPattern:
    """A mapping from patterns of parameter names (see `Patterns`) to values valid for `value`."""

    value: Check
    metavar: str = "PATTERN:N,..."

    @property
    def expected(self) -> str:
        return "pattern:value pairs as *.bias:32,<1024:16"

    def __call__(self, name: str, value: Any) -> Patterns[Any]:
        return patterns(name, value, self.value)

    def read(self, text: str) -> dict[str, Any]:
        """Parse pairs of pattern and value. The last colon of a pair ends its pattern; a pattern
        has no comma."""
        pairs = [pair.rpartition(":") for pair in text.split(",")]
        if not all(pattern for pattern, _, _ in pairs):
            raise ValueError(text)
        read = {pattern: self.value.read(one) for pattern, _, one in pairs}
        if len(read) < len(pairs):
            raise UserError(f"{text!r} must give each pattern once")
        return read


@dataclass(frozen=True)
class Folder:
    """The path of a folder, as text."""

    metavar: str = "FOLDER"
    expected: str = "a folder"

    def __call__(self, name: str, value: Any) -> str:
        return str(checked_path(name, value))

    def read(self, text: str) -> str:
        return text


def read_points(text: str, value: Check) -> dict[int, Any]:
    """Parse a mapping from samples to values in the command line's form: ``0:32,20000:1``.

    Raises:
        ValueError: the text has a different form.
        UserError: a number of samples is repeated, or follows a larger one.
    """
    pairs = [pair.split(":") for pair in text.split(",")]
    read = {int(samples): value.read(one) for samples, one in pairs}
    if len(read) < len(pairs):
        raise UserError(f"{text!r} must give each number of samples once")
    if [*read] != sorted(read):
        raise UserError(f"{text!r} must have increasing numbers of samples")
    return read


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
