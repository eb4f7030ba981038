"""Lines for the user, on stderr. Imports nothing of MPI."""

from __future__ import annotations

import contextlib
import sys


def tell(*lines: str) -> None:
    """Write lines to stderr in one piece. Where that is not possible (a full disk, a terminal that
    is gone, a pipe that nobody reads) nothing is written: no job is to end for that. Local."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
