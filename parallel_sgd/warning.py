"""Warnings about the user's program, at the line of that program."""

from __future__ import annotations

import sys
import warnings

from .errors import UserError

PACKAGE = __name__.partition(".")[0]


def warn(text: str) -> None:
    """Warn of a likely mistake, at the program's latest call of this package. This uses Python's
    `warnings`, so a filter can silence the warning, or raise it as an error. Local.

    Raises:
        UserError: a filter turns the warning into an error. The caller must report this to all
            ranks.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    try:
        warnings.warn(text, stacklevel=level)
    except Warning as error:
        raise UserError(str(error)) from error


def _is_own(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.") or module == "contextlib"
