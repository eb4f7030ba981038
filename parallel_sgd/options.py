"""Options that declare themselves: a field says its default, what it must be, and what it is for.

    @options
    class EASGD(psgd.Algorithm[EASGDState]):
        beta: float = option(0.9, Real(most=1), "how far the center moves to the models' mean")
        period: int = option(10, Whole(1), "minibatches between two such moves")

From these lines come the checks when an object is made, its documentation, its `repr`, and the
command line. Options that several classes share are a class of their own, which the others *have*,
as a `group`; they are given and read by their own names:

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

from .checks import ByPattern, BySamples, Check, Choice, Folder, Real, Whole
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
    """A field of a class of `options`.

    Args:
        default: what holds where nothing is given. None may be given where it is the default.
        check: what it must be; None: the class itself sees to that.
        help: what it is for, in one line or two.
        compare: whether all ranks must be given the same.
        python_only: whether the command line leaves it out.
    """
    metadata = {"check": check, "help": help, "python_only": python_only}
    return dataclass_field(default=default, repr=compare, compare=compare, metadata=metadata)


def group(kind: type[Options], **preset: Any) -> Any:
    """A field that holds options which several classes share.

    Args:
        kind: their class.
        preset: what holds where it is not given, and is not the class's own default.
    """
    return dataclass_field(default=kind(**preset), metadata={"group": preset})


class Options:
    """Base of all classes of options; each is decorated by `options`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init__(self, **given: Any) -> None:
        raise TypeError(f"{type(self).__name__} must be decorated by @options")

    def __post_init__(self) -> None:
        """Check every option by itself. Classes whose options depend on each other extend this."""
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

    def require_at_most_one(self, *names: str) -> None:
        """See that of some options, None by default, no two are given.

        Raises:
            UserError: they are.
        """
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            texts = " and ".join(f"{name}={shown(getattr(self, name))}" for name in given)
            raise UserError(f"{texts}: at most one of {', '.join(names)} may be given")

    def require_use(self, name: str, used: bool, needs: str) -> None:
        """See that an option of this class, if it is not as by default, has an effect.

        Args:
            used: whether it is looked at, beside the others that were given.
            needs: what would have to be given, so that it were.
        Raises:
            UserError: it has none.
        """
        default = self.__dataclass_fields__[name].default
        require_use(name, getattr(self, name), default, used, needs)


def options(kind: type[OptionsT]) -> type[OptionsT]:
    """Make a frozen dataclass of a class of options; groups are given and read as if its own."""
    made = dataclass(frozen=True, kw_only=True, repr=False)(kind)
    init: Any = made.__init__

    every = list(all_options(made))

    def __init__(self: Options, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            example = f"{made.__name__}({every[0].name if every else 'option'}=...)"
            raise TypeError(f"{made.__name__}: options are given by their names, as {example}")
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
        name: by which it is given.
        field: of the class, or of the class of the group that has it.
        path: of names of the groups in which it is, with dots; empty where the class itself has it.
        default: what holds in this class where nothing is given.
    """

    name: str
    field: Field[Any]
    path: str
    default: Any

    @property
    def help(self) -> str:
        """What it is for."""
        return str(self.field.metadata.get("help", ""))

    @property
    def check(self) -> Check | None:
        """What it must be; None where only the class knows."""
        check: Check | None = self.field.metadata.get("check")
        return check


def all_options(kind: Any) -> Iterator[Option]:
    """Those of a class of options, or of any dataclass, with those of its groups."""
    for field in fields(kind):
        if "group" not in field.metadata:
            yield Option(field.name, field, "", field.default)
            continue
        for inner in all_options(type(field.default)):
            path = f"{field.name}.{inner.path}".rstrip(".")
            default = attrgetter(inner.name)(field.default)
            yield Option(inner.name, inner.field, path, default)


def values_of(chosen: Any) -> dict[str, Any]:
    """The value of every option, by its name; of a group of another class than usual also that."""
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
    """What was given by the options' own names, with those of groups put into their groups."""
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
                f"{field.name}={shown(held)} of {kind.__name__} must be such as "
                f"{usual.__name__}(), or its options must be given by their names: "
                + ", ".join(inner.name for inner in all_options(usual))
            )
        names = {inner.name for inner in all_options(type(held))} & folded.keys()
        own = {name: folded.pop(name) for name in names}
        if held is field.default:  # which may have more than was preset
            kind_of_group: Any = type(held)
            folded[field.name] = kind_of_group(**field.metadata["group"] | own) if own else held
        else:
            folded[field.name] = replace(held, **own)
    return folded


def require_options(taker: str, kind: type[Options], names: Iterable[str]) -> None:
    """Refuse names that are none of the options of a class.

    Args:
        taker: what takes these options.
    Raises:
        UserError: naming the first such name, and the nearest option.

    Local.
    """
    known = [option.name for option in all_options(kind)]
    for name in sorted(set(names) - set(known)):
        raise UserError(_unknown(taker, name, known))


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """What to say of an option that a class does not have."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{kind} has no option {name!r}: {hint}It has {', '.join(known) or 'none'}"


def _documented(kind: Any, every: Sequence[Option]) -> str:
    """The docstring, with what each option is for."""
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    lines = []
    for option in every:
        line = f"{option.name}: {option.help}".rstrip(" :") + f" (default: {option.default!r})"
        lines += textwrap.wrap(line, 96, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return "\n".join([text, "", "Options:", *lines]) if lines else text
