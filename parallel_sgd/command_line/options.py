"""Make command-line options from classes of options, so that each is declared only once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..errors import UserError
from ..options import Check, Choice, Folder, Option, Real, Whole, all_options, values_of
from ..validation import shown


def add_options(
    group: Any,
    kinds: Mapping[str, type],
    chosen: str,
    reserved: Collection[str],
) -> None:
    """Add the options of a group of classes; only those of the chosen class are shown in the help.

    Args:
        group: of a parser.
        kinds: the classes of options, by the name that the user chooses from.
        chosen: the name of the chosen class. Options not given are absent from the namespace.
        reserved: names not allowed for these options.

    Raises:
        UserError: an option has a reserved name, or a type without a command-line form.
    """
    added: set[str] = set()
    for kind in [chosen, *kinds]:
        for option in all_options(kinds[kind]):
            if option.field.metadata.get("python_only") or option.name in added:
                continue
            added.add(option.name)
            if option.name in reserved:
                raise UserError(
                    f"option {option.name} of {kinds[kind].__name__} must have another name: "
                    f"train.py has --{option.name.replace('_', '-')} already"
                )
            add_option(group, option, check_of(option, kinds[kind]), shown=kind == chosen)


def check_of(option: Option, kind: type) -> Check:
    """Return the check of an option: the declared check, or a check by the option's type.

    Raises:
        UserError: the option has neither.
    """
    if option.check is not None:
        return option.check
    try:
        hint = get_type_hints(kind)[option.name]
    except NameError as error:
        raise UserError(f"option {option.name} of {kind.__name__}: its type: {error}") from error
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [part for part in parts if part is not type(None)]
    if kinds == [bool]:
        return Choice(True, False)
    if len(kinds) == 1 and kinds[0] in (int, float, str):
        return _Plain(kinds[0])
    raise UserError(
        f"option {option.name} of {kind.__name__}: its type, {hint}, does not say what the command "
        "line may give; declare it by parallel_sgd.options.option, with a check"
    )


class _Plain:
    """A number or a text without a further check: its class checks the value itself."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        numbers: dict[type, Check] = {int: Whole(), float: Real()}
        check = numbers.get(kind) or Folder("TEXT", "a text")
        self.metavar, self.expected = check.metavar, check.expected

    def __call__(self, name: str, value: Any) -> Any:
        return value

    def read(self, text: str) -> Any:
        return self._kind(text)


def add_option(group: Any, option: Option, check: Check, *, shown: bool) -> None:
    """Add an option to a group of a parser. An option not given is absent from the namespace."""
    flag = "--" + option.name.replace("_", "-")
    default = "" if option.default in (None, {}) else f" (default: {_text(option.default)})"
    help_text = f"{option.help}{default}".replace("%", "%%") if shown else argparse.SUPPRESS
    keywords: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if not isinstance(check, Choice) or set(check.values) != {True, False}:
        metavar = check.metavar.replace("%", "%%")
        keywords = {"type": reader(option.name, check), "metavar": metavar}
    group.add_argument(flag, default=argparse.SUPPRESS, help=help_text, **keywords)


def build(chosen: str, kinds: Mapping[str, type], args: argparse.Namespace) -> Any:
    """Make an instance of the chosen class from the given options.

    Raises:
        UserError: a given option belongs only to other choices, or its value is wrong.
    """
    kind = kinds[chosen]
    own = {option.name for option in all_options(kind)}
    owners: dict[str, list[str]] = {}
    for other in kinds:
        for option in all_options(kinds[other]):
            owners.setdefault(option.name, []).append(other)
    for name in sorted(owners.keys() - own):
        if hasattr(args, name):
            flag, value = name.replace("_", "-"), shown(getattr(args, name))
            others = ", ".join(owners[name])
            raise UserError(f"--{flag}={value} is not an option of {chosen}, but of {others}")
    return kind(**{name: getattr(args, name) for name in own if hasattr(args, name)})


def describe(options: Any) -> dict[str, Any]:
    """Return the options of an instance, with its class name, in a form for JSON.

    Nested options too.
    """
    described: dict[str, Any] = {"name": type(options).__name__}
    for name, value in values_of(options).items():
        if is_dataclass(value):
            value = describe(value)
        elif isinstance(value, Mapping):
            value = {str(key): item for key, item in value.items()}
        described[name] = value
    return described


def reader(name: str, check: Check) -> Callable[[str], Any]:
    """Return a function to parse an option's text, for use as an argparse type."""

    def read(text: str) -> Any:
        try:
            return check.read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            expected = f"{name}={shown(text)} must be {check.expected}"
            raise argparse.ArgumentTypeError(expected) from None

    return read


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
