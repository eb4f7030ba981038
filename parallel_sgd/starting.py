"""Ctrl-C while one of our own programs starts: one line, and no traceback of what it imports.

The first thing that the package imports, since the rest of it takes a second. Local.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

__all__ = ["is_own_program", "say_interrupted"]


def is_own_program() -> bool:
    """Whether this process was started as `parallel-sgd`, or as a module of this package."""
    words = sys.orig_argv
    if sys.argv[:1] == ["-m"] and "-m" in words[:-1]:
        return words[words.index("-m") + 1].partition(".")[0] == __package__
    return os.path.basename(sys.argv[0] if sys.argv else "") == "parallel-sgd"


def say_interrupted() -> None:
    """From now on an interrupt that nobody handles says so in one line; the exit code stays."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("parallel-sgd: interrupted", file=sys.stderr, flush=True)
        else:
            previous(kind, error, frames)

    sys.excepthook = hook
