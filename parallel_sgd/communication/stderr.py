"""Print lines to the user on stderr, without MPI."""

from __future__ import annotations

import contextlib
import os
import sys

_fallback: int | None = None  # a file descriptor


def set_stderr_fallback(descriptor: int) -> None:
    """Give `write_stderr` a second descriptor, for lines refused by standard error. Local.

    Args:
        descriptor: of the terminal, if stderr is a file.
    """
    global _fallback
    _fallback = descriptor


def write_stderr(*lines: str) -> None:
    """Write lines to stderr in one piece, or else to the descriptor of `set_stderr_fallback`.

    A failed write is ignored (full disk, closed terminal, pipe without a reader) and does not end
    the job. Local.
    """
    text = "".join(f"{line}\n" for line in lines)
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        if _fallback is not None:
            with contextlib.suppress(OSError):
                os.write(_fallback, text.encode(errors="backslashreplace"))
