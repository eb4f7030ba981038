"""The argument parser of every command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ..errors import UserError

LONGEST = 500  #: characters of an error: arguments may be of any length


class Parser(argparse.ArgumentParser):
    """Raises a UserError, one line, where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.removeprefix("argument ").split())
        raise UserError(line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}...")
