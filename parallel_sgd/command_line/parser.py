"""The argument parser of every command."""

from __future__ import annotations

import argparse
import difflib
from typing import NoReturn

from ..errors import UserError

LONGEST = 500  #: characters of an error: arguments may be of any length


class Parser(argparse.ArgumentParser):
    """Raises a UserError, one line, where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.removeprefix("argument ").split())
        _, unknown, rest = line.partition("unrecognized arguments: --")
        if unknown:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            given = "--" + rest.split()[0].partition("=")[0]
            near = difflib.get_close_matches(given, known, n=1)
            line += f": did you mean {near[0]}?" if near else ""
        raise UserError(line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}...")
