"""Read, check and write a TOML file of options for train.py.

The options are checked by their own parser.
"""

from __future__ import annotations

import argparse
import difflib
import json
import textwrap
import tomllib
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...files import content_of
from ...options import all_options, values_of
from ...schedules import Cosine, Linear, Steps, WarmUp
from ...validation import line_of, shown
from .options import DEFAULT_LR

#: Options for the command line only.
COMMAND_LINE_ONLY = {"help", "version", "config", "print_config"}
MAX_DOTS = 10_000  #: in a file; a file with this many is read within half a second
RUN_ONLY = {"output", "resume"}  #: not written to the file that gives a run again


def arguments_of(path: str | Path, parser: argparse.ArgumentParser) -> list[str]:
    """Return a file's options as arguments of the command line.

    Args:
        path: the file.
        parser: a parser with all options. A key of the file is the name of an option, with - or _.

    Raises:
        UserError: the file is missing or no TOML, a key is not an option, or a value has a kind not
            taken by any option.

    Local.
    """
    data = content_of(str(path), path).removeprefix(BOM_UTF8)  # written by some editors
    if data.count(b".") > MAX_DOTS:  # tomllib's time grows with the square of the dots in a name
        raise UserError(f"{path} is not a file of options: it has more than {MAX_DOTS} dots")
    try:
        content = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not well-formed TOML: {line_of(error)}") from None
    except ValueError:  # from `int`
        raise UserError(f"{path}: a number in it must have fewer digits") from None
    actions = {action.dest: action for action in settable(parser)}
    arguments: list[str] = []
    keys: dict[str, str] = {}  # by the name of the option
    for key, value in content.items():
        name = key.replace("-", "_")
        if keys.setdefault(name, key) != key:
            raise UserError(
                f"{path}: {keys[name]!r} and {key!r} are the same option: give only one"
            )
        if name not in actions:
            near = difflib.get_close_matches(name, actions, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{path}: {key!r} is not an option of train.py{hint}")
        try:
            arguments += _arguments(actions[name], value)
        except TypeError as error:
            raise UserError(f"{path}: {key}={shown(value)} must be {error}") from None
        except ValueError:
            raise UserError(f"{path}: {key} must be a number of fewer digits") from None
    return arguments


def drop_unchosen_defaults(
    options: argparse.Namespace,
    file: argparse.Namespace,
    line: argparse.Namespace,
    choices: Mapping[str, Mapping[str, type]],
) -> None:
    """Drop a file's options for an algorithm or optimizer replaced on the command line.

    A run's folder has a file with all options. If the command line chooses another algorithm or
    optimizer, drop the options known only to the file's choice, as far as they have their default
    values. Drop the default learning rate of the file's optimizer, too. A learning rate on the
    command line replaces either learning rate of the file.

    Args:
        options: the options from both; changed.
        file, line: the options from the file alone, and from the command line alone.
        choices: the classes to choose from, by the name of the choosing option.

    Local.
    """
    for name, kinds in choices.items():
        file_names, line_names = (
            {option.name for option in all_options(kinds[getattr(of, name)])}
            for of in (file, options)
        )
        common = {key: getattr(file, key) for key in file_names & line_names if hasattr(file, key)}
        if name == "optimizer" and not {"lr", "lr_per_sample"} & common.keys():
            common["lr"] = DEFAULT_LR[file.optimizer]
        if file_names <= line_names:
            continue
        defaults = values_of(kinds[getattr(file, name)](**common))
        for key in file_names - line_names - vars(line).keys():
            if key in defaults and getattr(file, key, None) == defaults[key]:
                vars(options).pop(key, None)
    rates, given = ("lr", "lr_per_sample"), vars(line).keys()
    rate_is_default = getattr(file, "lr", None) == DEFAULT_LR[file.optimizer]
    if options.optimizer != file.optimizer and rate_is_default and given.isdisjoint(rates):
        del options.lr
    for rate, other in (rates, rates[::-1]):
        if rate in given and other not in given:
            vars(options).pop(other, None)


def settable(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the options allowed in a file, in the parser's order. Local."""
    for action in parser._actions:
        if action.option_strings and action.dest not in COMMAND_LINE_ONLY:
            yield action


def _arguments(action: argparse.Action, value: Any) -> list[str]:
    """Return the arguments that set an option to this value.

    Raises:
        TypeError: the value has the wrong kind; the message names the right kind.
    """
    flag, *other = action.option_strings
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise TypeError("true or false")
        return [flag] if value else other[:1]  # --no-x, if the option has it
    if isinstance(value, list | dict) and action.nargs == "+":
        several = value if isinstance(value, list) else [_pair(*item) for item in value.items()]
        return [flag, *map(_text, several)]
    if isinstance(value, dict):
        if ":" not in (action.metavar or ""):
            raise TypeError("one value: options stand at the top of the file, in no section")
        return [f"{flag}=" + ",".join(f"{key}:{_text(item)}" for key, item in value.items())]
    return [f"{flag}={_text(value)}"]


def _pair(name: str, value: Any) -> str:
    return f"{name}={json.dumps(value)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    raise TypeError(
        "a number, a text, true or false; or a list or table of these if the option takes several"
    )


def config_text(
    parser: argparse.ArgumentParser,
    values: Mapping[str, Any],
    *,
    heading: Sequence[str] = (),
    whole: bool = False,
    only: Collection[str] | None = None,
) -> str:
    """Return a file of options.

    Args:
        parser: the parser; its help texts are written above the options.
        values: the value of each option by name; None is written as a comment.
        heading: lines of comment at the top.
        whole: also write the options of a single run (`RUN_ONLY`).
        only: the names of the options to write; None: all of them.

    Returns:
        TOML that `arguments_of` reads.

    Local.
    """
    lines = [f"# {line}" for line in heading]
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if action in [*settable(parser)]
            and action.help != argparse.SUPPRESS
            and (only is None or action.dest in only)
        ]
        if not actions:
            continue
        lines += ["", f"# ---- {group.title}"]
        for action in actions:
            if action.dest in RUN_ONLY and not whole:
                continue
            value = values.get(action.dest)
            help_text = (action.help or "").replace("%%", "%")
            lines += [
                "",
                *textwrap.wrap(help_text, 98, initial_indent="# ", subsequent_indent="# "),
            ]
            name = action.dest
            given = value is not None and value != {}
            lines.append(f"{name} = {toml(value)}" if given else f"# {name} =")
    return "\n".join(lines).strip() + "\n"


def toml(value: Any) -> str:
    """Return a value as TOML, so that `arguments_of` restores the same value. Local."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Steps | Linear):
        before = "linear:" if isinstance(value, Linear) else ""
        return toml(before + _points(value.values))
    if isinstance(value, WarmUp):
        return toml(f"warmup:{value.samples}:{json.loads(toml(value.then))}")
    if isinstance(value, Cosine):
        return toml("cosine:" + _points({0: value.start, value.samples: value.end}))
    if isinstance(value, Mapping):
        return toml(_points(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False)


def _points(values: Mapping[Any, Any]) -> str:
    return ",".join(f"{key}:{_text(value)}" for key, value in values.items())
