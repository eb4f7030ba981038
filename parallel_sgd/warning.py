"""Warnings about what a program does, at the program's own line."""

from __future__ import annotations

import sys
import warnings

from .errors import UserError

PACKAGE = __name__.partition(".")[0]


def warn(text: str) -> None:
    """Warn of something that is likely to be a mistake, where the program has called this package:
    by Python's own `warnings`, so that a filter can silence it, or make it an error. Local.

    Raises:
        UserError: a filter makes an error of it. The other ranks have to be told.
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
