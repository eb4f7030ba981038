"""Errors for the user to fix, and errors shared by all ranks."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

__all__ = [
    "DivergedError",
    "NotFinite",
    "PeerFailure",
    "Preempted",
    "RanksLost",
    "SharedError",
    "SharedPeerFailure",
    "SharedProblem",
    "UserError",
]

SMALLER_RATE = "a smaller learning rate may help"
"""The last words of every error about diverged training."""

MOST_FRAMES = 5  #: shown in a notebook, of the user's own code

_PACKAGE = str(Path(__file__).parent) + os.sep


class UserError(ValueError):
    """A mistake in the user's request, in a single line, printed without a traceback.

    The line names the argument, its value, and the requirement: "lr=nan must be a finite number, at
    least 0". The entry points add the rank, and the place in the user's own code.
    """

    def _render_traceback_(self) -> list[str]:
        """Return the lines shown by IPython and Jupyter: the user's own frames, then the error.

        If a function of the user has caused the error, the frames are those of its exception.
        """
        error: BaseException = self
        while error.__cause__ is not None:
            error = error.__cause__
        places = traceback.extract_tb(error.__traceback__)
        frames = [place for place in places if is_users_file(place.filename)][-MOST_FRAMES:]
        lines = [f"line {place.lineno}, in {place.name}: {place.line}" for place in frames]
        return [*lines, f"{type(self).__name__}: {self}"]


class SharedError(UserError):
    """A UserError raised on all ranks at the same point, by agreement."""


class DivergedError(SharedError):
    """A SharedError caused only by numbers that are not finite. The failed steps have no effect, so
    training can continue after restoring a learner's earlier state."""


class RanksLost(RuntimeError):
    """Ranks have failed, and the remaining ranks can continue: see `Learner.recover`.

    Raised with fault-tolerant ranks (`parallel-sgd run --survive`), on every remaining rank, in a
    wait for other ranks. In its own calls a learner recovers automatically.
    """


class RanksChanged(RanksLost):
    """The ranks were reconfigured meanwhile: start again with the present ranks."""


class RankFailed(RuntimeError):
    """Another rank of a world of threads has ended with an error."""


class PeerFailure(UserError):
    """A UserError caused by a silent or failed rank, and not by the program: a restart may
    succeed."""


class SharedPeerFailure(SharedError):
    """A SharedError caused by failed ranks, and not by the program."""


class Preempted(SystemExit):
    """All ranks exit on request, after saving their state: exit code 75."""

    def __init__(self) -> None:
        super().__init__(os.EX_TEMPFAIL)


class NotFinite(str):
    """A one-line problem with numbers that are not finite. If there is no other, a `DivergedError`
    follows."""

    __slots__ = ()


class SharedProblem(str):
    """A one-line problem that names its ranks, already reported to all ranks, or about to be.
    `Communicator.raise_together` adds nothing to the line."""

    __slots__ = ()


def is_users_file(name: str) -> bool:
    """Return whether a frame's file is the user's own, or a cell of a notebook. Local."""
    if name.startswith("<"):
        return name.startswith("<ipython-input")
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = (sysconfig.get_path(kind) + os.sep for kind in kinds)
    return not name.startswith((_PACKAGE, *libraries))
