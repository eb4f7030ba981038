"""The argument parser of every command."""

from __future__ import annotations

import argparse
import difflib
import os
from typing import NoReturn

from .errors import UserError
from .validation import shown

LONGEST = 500  #: characters of an error: arguments may be of any length


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a one-line UserError, instead of argparse's usage text and
    exit."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.removeprefix("argument ").split())
        _, unknown, rest = line.partition("unrecognized arguments: --")
        if unknown:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            given = "--" + rest.split()[0].partition("=")[0]
            near = difflib.get_close_matches(given, known, n=1)
            line += f": did you mean {near[0]}?" if near else ""
        raise UserError(line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}...")


def path_given(name: str, path: str) -> str:
    """Expand a leading ``~`` of a path, as a shell does. (The shell expands no path in a file, or
    behind "=".)

    Raises:
        UserError: there is no such home folder.
    """
    if not path.startswith("~"):
        return path
    whole = os.path.expanduser(path)
    if whole.startswith("~"):
        raise UserError(
            f"{name}={shown(path)} must be in a home folder that exists; write "
            f"{shown('./' + path)} for a path that begins with ~"
        )
    return whole
