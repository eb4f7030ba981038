"""Options as declarations: a field has its default, its check, and its help text.

    @options
    class EASGD(psgd.Algorithm[EASGDState]):
        beta: float = option(0.9, Real(most=1), "how far the center moves to the models' mean")
        period: int = option(10, Whole(1), "minibatches between two such moves")

These lines produce the checks when an object is made, its documentation, its `repr`, and the
command line. Options shared by several classes form a class of their own, included as a `group`.
Options of a group are given and read by their own names:

    @options
    class DataParallelSGD(psgd.Algorithm[DataParallelState]):
        exchange: ExchangeOptions = group(ExchangeOptions)

    DataParallelSGD(gradient_bits=1).gradient_bits

Everything here is local.
"""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from dataclasses import field as dataclass_field
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

from .checks import ByPattern, BySamples, Check, Choice, Folder, Real, Whole, WholeOr
from .errors import UserError
from .validation import require_use, set_validated, shown

__all__ = [
    "ByPattern",
    "BySamples",
    "Check",
    "Choice",
    "Folder",
    "Option",
    "Options",
    "Real",
    "Whole",
    "WholeOr",
    "all_options",
    "group",
    "option",
    "options",
    "values_of",
]

OptionsT = TypeVar("OptionsT", bound="Options")


def option(
    default: Any,
    check: Check | None = None,
    help: str = "",
    *,
    compare: bool = True,
    python_only: bool = False,
) -> Any:
    """Declare a field of a class of `options`.

    Args:
        default: the default value. None is a valid value only if it is the default.
        check: validates the value; None: the class itself validates.
        help: the purpose, in one line or two.
        compare: all ranks must have the same value.
        python_only: omit the option from the command line.
    """
    metadata = {"check": check, "help": help, "python_only": python_only}
    return dataclass_field(default=default, repr=compare, compare=compare, metadata=metadata)


def group(kind: type[Options], **preset: Any) -> Any:
    """Declare a field of options shared by several classes.

    Args:
        kind: the class of the shared options.
        preset: defaults that differ from those of `kind`.
    """
    return dataclass_field(default=kind(**preset), metadata={"group": preset})


class Options:
    """Base of all classes of options; each is decorated by `options`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init__(self, **given: Any) -> None:
        raise TypeError(f"{type(self).__name__} must be decorated by @options")

    def __post_init__(self) -> None:
        """Check every option by itself. Classes with interdependent options extend this."""
        for field in fields(self):
            check, value = field.metadata.get("check"), getattr(self, field.name)
            if check is not None and not (value is None and field.default is None):
                set_validated(self, **{field.name: check(field.name, value)})

    def __repr__(self) -> str:
        texts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if "group" in field.metadata and type(value) is type(field.default):
                texts.append(repr(value).partition("(")[2][:-1])
            elif field.compare:
                texts.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(filter(None, texts))})"

    def brief(self) -> str:
        """Return the text of this object with the options that differ from their defaults:
        ``DataParallelSGD(gradient_bits=1)``. Local."""
        return f"{type(self).__name__}({', '.join(self._differing(type(self)))})"

    def _differing(self, of: Any) -> Iterator[str]:
        """Yield the texts of the options that differ from the defaults of a class or an object."""
        for field in fields(self):
            default: Any = field.default if of is type(self) else getattr(of, field.name)
            value = getattr(self, field.name)
            if "group" in field.metadata and type(value) is type(default):
                yield from value._differing(default)
            elif field.compare and value != default:
                yield f"{field.name}={value.brief() if isinstance(value, Options) else repr(value)}"

    def require_at_most_one(self, *names: str) -> None:
        """Check that at most one of some options, with default None, is given.

        Raises:
            UserError: several are given.
        """
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            texts = " and ".join(f"{name}={shown(getattr(self, name))}" for name in given)
            raise UserError(f"{texts}: at most one of {', '.join(names)} may be given")

    def require_use(self, name: str, used: bool, needs: str) -> None:
        """Check that an option of this class has an effect, if not at its default.

        Args:
            used: True if the other given options make this one effective.
            needs: options needed for an effect.
        Raises:
            UserError: the option has no effect.
        """
        default = self.__dataclass_fields__[name].default
        require_use(name, getattr(self, name), default, used, needs)


def options(kind: type[OptionsT]) -> type[OptionsT]:
    """Make a frozen dataclass of a class of options. Group options become keywords and attributes
    of the class itself."""
    made = dataclass(frozen=True, kw_only=True, repr=False)(kind)
    init: Any = made.__init__

    every = list(all_options(made))

    def __init__(self: Options, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            example = f"{made.__name__}({every[0].name if every else 'option'}=...)"
            raise TypeError(f"{made.__name__}: options must be given by name, as {example}")
        folded = _folded(made, given)
        for name in sorted(folded.keys() - made.__dataclass_fields__.keys()):
            raise TypeError(_unknown(made.__name__, name, [option.name for option in every]))
        init(self, **folded)

    made.__init__ = __init__  # type: ignore[method-assign]
    made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                option.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=option.field.type,
            )
            for option in every
        ]
    )
    for option in every:
        if option.path:
            setattr(made, option.name, property(attrgetter(f"{option.path}.{option.name}")))
    made.__doc__ = _documented(made, every)
    return made


class Option(NamedTuple):
    """One option of a class.

    Attributes:
        name: the keyword.
        field: of the class, or of the group's class.
        path: names of the option's groups, joined by dots; empty for the class's own option.
        default: in this class.
    """

    name: str
    field: Field[Any]
    path: str
    default: Any

    @property
    def help(self) -> str:
        """The purpose of the option."""
        return str(self.field.metadata.get("help", ""))

    @property
    def check(self) -> Check | None:
        """The check of the option; None if the class validates."""
        check: Check | None = self.field.metadata.get("check")
        return check


def all_options(kind: Any) -> Iterator[Option]:
    """Yield the options of a class of options, or of any dataclass, including those of its
    groups."""
    for field in fields(kind):
        if "group" not in field.metadata:
            yield Option(field.name, field, "", field.default)
            continue
        for inner in all_options(type(field.default)):
            path = f"{field.name}.{inner.path}".rstrip(".")
            default = attrgetter(inner.name)(field.default)
            yield Option(inner.name, inner.field, path, default)


def values_of(chosen: Any) -> dict[str, Any]:
    """Return the value of every option by name; for a group of a non-default class also the class
    name."""
    values: dict[str, Any] = {}
    for field in fields(chosen):
        value = getattr(chosen, field.name)
        if "group" not in field.metadata:
            values[field.name] = value
            continue
        values |= values_of(value)
        if type(value) is not type(field.default):
            values[field.name] = type(value).__name__
    return values


def _folded(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, with the options of each group replaced by a group object."""
    folded = dict(given)
    for field in fields(kind):
        if "group" not in field.metadata:
            continue
        held: Any = folded.get(field.name, field.default)
        usual = type(field.default)
        alike: Any = tuple(
            base for base in usual.__mro__ if base is usual or not issubclass(base, Options)
        )
        alike = tuple(base for base in alike if base not in Options.__mro__)
        if not isinstance(held, alike):
            raise UserError(
                f"{field.name}={shown(held)} of {kind.__name__} must be an instance such as "
                f"{usual.__name__}(), or its options must be given by name: "
                + ", ".join(inner.name for inner in all_options(usual))
            )
        names = {inner.name for inner in all_options(type(held))} & folded.keys()
        own = {name: folded.pop(name) for name in names}
        if held is field.default:  # a subclass may have more options
            kind_of_group: Any = type(held)
            folded[field.name] = kind_of_group(**field.metadata["group"] | own) if own else held
        else:
            folded[field.name] = replace(held, **own)
    return folded


def require_options(taker: str, kind: type[Options], names: Iterable[str]) -> None:
    """Refuse names that are not options of a class.

    Args:
        taker: the receiver of these options, for the error.
    Raises:
        UserError: names the first unknown name, and the nearest option.

    Local.
    """
    known = [option.name for option in all_options(kind)]
    for name in sorted(set(names) - set(known)):
        raise UserError(_unknown(taker, name, known))


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """Return the error text for an unknown option."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{kind} has no option {name!r}: {hint}It has {', '.join(known) or 'none'}"


def _documented(kind: Any, every: Sequence[Option]) -> str:
    """Return the docstring, with a list of the options."""
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    lines = []
    for option in every:
        line = f"{option.name}: {option.help}".rstrip(" :") + f" (default: {option.default!r})"
        lines += textwrap.wrap(line, 96, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join([text, "", "Options:", *lines]) if lines else text
