"""The argument parser of every command."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ..errors import UserError

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """Raises a UserError, one line, where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))
