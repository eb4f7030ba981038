"""Command-line options made from the fields of dataclasses, so that each exists only once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ..algorithms.compressed import AUTO
from ..errors import UserError
from ..schedules import Cosine, Linear, Schedule, Steps
from ..validation import shown

SHAPES = ("linear", "cosine")  #: of schedules, between their points
COSINE = "cosine:0:0.3,50000:0.01"
RATES = f"0:0.3,20000:0.03 (linear:0:0,1000:0.3 goes up in between, {COSINE} down)"


def add_fields(parser: argparse.ArgumentParser, title: str, kinds: Mapping[str, type]) -> None:
    """Add an option for every field of these dataclasses, under one heading.

    Args:
        kinds: dataclasses by the name under which the user chooses among them. A field that
            several have becomes one option; what is not given stays absent from the namespace.
            A field with `python_only` in its metadata becomes none.
    """
    group = parser.add_argument_group(title)
    known: dict[str, list[str]] = {}
    for choice, kind in kinds.items():
        for field in (field for field in fields(kind) if not field.metadata.get("python_only")):
            known.setdefault(field.name, []).append(choice)
    for name, choices in known.items():
        kind = kinds[choices[0]]
        annotation = next(str(f.type) for f in fields(kind) if f.name == name)
        defaults = [next(f.default for f in fields(kinds[c]) if f.name == name) for c in choices]
        only = _only(choices, list(kinds))
        metavar = next(f.metadata.get("metavar") for f in fields(kind) if f.name == name)
        shown = "" if defaults[0] is None else f" (default: {_each(choices, defaults)})"
        texts = {c: _help(kinds[c], name) for c in choices}
        others = [f"; {c}: {text}" for c, text in texts.items() if text != texts[choices[0]]]
        help_text = (only + texts[choices[0]] + "".join(others) + shown).replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if annotation == "bool":
            group.add_argument(
                flag,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=help_text,
            )
        else:
            group.add_argument(
                flag,
                type=_reader(name, annotation),
                default=argparse.SUPPRESS,
                metavar=metavar or _metavar(annotation),
                help=help_text,
            )


def _each(choices: list[str], defaults: list[Any]) -> str:
    """The default, or where the choices do not agree on one, that of each."""
    if all(default == defaults[0] for default in defaults):
        return str(defaults[0])
    return ", ".join(f"{c} {default}" for c, default in zip(choices, defaults, strict=True))


def build(chosen: str, kinds: Mapping[str, type], given: argparse.Namespace) -> Any:
    """Make the chosen dataclass from the options given.

    Raises:
        UserError: an option was given that belongs only to other choices, or its value is wrong.
    """
    kind = kinds[chosen]
    own = {field.name for field in fields(kind)}
    foreign = {field.name for other in kinds.values() for field in fields(other)} - own
    for name in sorted(foreign):
        if hasattr(given, name):
            flag, value = name.replace("_", "-"), shown(getattr(given, name))
            raise UserError(f"--{flag}={value} is not an option of {chosen}")
    return kind(**{name: getattr(given, name) for name in own if hasattr(given, name)})


def describe(options: Any) -> dict[str, Any]:
    """A dataclass of options with its name, and those inside it, as JSON can hold them."""
    described: dict[str, Any] = {"name": type(options).__name__}
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            value = describe(value)
        elif isinstance(value, Mapping):
            value = {str(key): item for key, item in value.items()}
        described[field.name] = value
    return described


def _reader(name: str, annotation: str) -> Callable[[str], Any]:
    """How the text of an option becomes a value of the field's type."""

    def read(text: str) -> Any:
        try:
            if "Mapping" in annotation and ":" in text:
                return _points(text, int)
            if "Schedule" in annotation and ":" in text:
                return _schedule(text)
            if text == AUTO and "str" in annotation.split(" | "):
                return text
            if "bool" in annotation.split(" | "):
                return {"true": True, "false": False}.get(text.lower(), text)
            if "int" in annotation.split(" | "):
                return int(text)
            if "float" in annotation.split(" | "):
                return float(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            expected = f"{name}={shown(text)} must be {_expected(annotation)}"
            raise argparse.ArgumentTypeError(expected) from None
        return text

    return read


def _schedule(text: str) -> Schedule:
    """One of rates: ``0:0.3,1000:0.1``, ``linear:0:0,1000:0.3`` or ``cosine:0:0.3,1000:0``."""
    kind, _, rest = text.partition(":")
    if kind not in SHAPES:
        return Steps(_points(text, float))
    points = _points(rest, float)
    if kind == "linear":
        return Linear(points)
    if len(points) != 2 or 0 not in points:
        raise UserError(f"{text!r} must give two rates, at 0 samples and at the end: {COSINE}")
    end = max(points)
    return Cosine(start=points[0], end=points[end], samples=end)


def _points(text: str, number: Callable[[str], Any]) -> dict[int, Any]:
    pairs = [pair.split(":") for pair in text.split(",")]
    points = {int(at): number(value) for at, value in pairs}
    if len(points) < len(pairs):
        raise UserError(f"{text!r} must give each number of samples once")
    return points


def _expected(annotation: str) -> str:
    number = "a whole number" if "int" in annotation.split(" | ") else "a number"
    if "Schedule" in annotation:
        return f"{number}, or samples:rate pairs as {RATES}"
    if "Mapping" in annotation:
        auto = f", or {AUTO}" if "str" in annotation.split(" | ") else ""
        return f"{number}, or samples:value pairs as 0:32,20000:1{auto}"
    return number


def _metavar(annotation: str) -> str:
    if "Schedule" in annotation:
        return "X | [linear:|cosine:]S:X,..."
    if "Mapping" in annotation:
        return "X | S:X,... | auto" if "str" in annotation.split(" | ") else "X | S:X,..."
    if "bool" in annotation.split(" | "):
        return "true | false | auto"
    if "float" in annotation.split(" | "):
        return "X"
    return "N" if "int" in annotation.split(" | ") else "NAME"


def _only(choices: list[str], kinds: list[str]) -> str:
    """Whose option it is, where it is not everybody's."""
    others = [kind for kind in kinds if kind not in choices]
    if not others:
        return ""
    named = ", ".join(choices if len(choices) <= len(others) else ["all but", *others])
    return f"{named.replace('all but,', 'all but')}: "


def _help(kind: type, name: str) -> str:
    """What the docstring of a dataclass, or of a base, says of a field under "Args:"."""
    for cls in kind.__mro__:
        match = re.search(
            rf"^ {{8}}(?:\w+, )*{name}(?:, \w+)*: ((?:.|\n {{12}})+)",
            cls.__doc__ or "",
            re.MULTILINE,
        )
        if match:
            return re.sub(r"\s+", " ", match[1]).replace("`", "").strip().rstrip(".")
    return ""
