"""Lines for the user, on stderr. Imports nothing of MPI."""

from __future__ import annotations

import contextlib
import os
import sys

_otherwise: int | None = None  # a descriptor


def tell_otherwise(descriptor: int) -> None:
    """Have `tell` write to this descriptor where standard error cannot be written to: that of a
    terminal, where stderr is a file. Local."""
    global _otherwise
    _otherwise = descriptor


def tell(*lines: str) -> None:
    """Write lines to stderr in one piece. Where that is not possible (a full disk, a terminal that
    is gone, a pipe that nobody reads), and `tell_otherwise` names no other place, nothing is
    written: no job is to end for that. Local."""
    text = "".join(f"{line}\n" for line in lines)
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        if _otherwise is not None:
            with contextlib.suppress(OSError):
                os.write(_otherwise, text.encode(errors="backslashreplace"))
