"""The error that is the user's to fix."""

from __future__ import annotations

import os

__all__ = [
    "DivergedError",
    "NotFinite",
    "Preempted",
    "RanksLost",
    "SharedError",
    "SharedLoss",
    "SharedProblem",
    "UserError",
    "WaitedInVain",
]

SMALLER_RATE = "a smaller learning rate may help"
"""The end of the line of every error of training that has diverged."""


class UserError(ValueError):
    """A mistake in what was asked for: its one line is all that the user needs, so no traceback.

    The line names the argument, its value, and what is required: "lr=nan must be a finite number,
    at least 0". The entry points add the rank, and where in the user's own code it arose.
    """


class SharedError(UserError):
    """A UserError that all ranks raise at the same point, because they have agreed to."""


class DivergedError(SharedError):
    """A SharedError of numbers that are not finite, and of nothing else: steps that are not taken,
    so that a learner that is put back where it was can go on."""


class RanksLost(RuntimeError):
    """Ranks have died, and the others can go on without them: `Learner.recover`.

    Raised where a rank waits for others, on every rank that is left, where the ranks survive each
    other (`parallel-sgd run --survive`). A learner recovers by itself in its own calls.
    """


class WaitedInVain(UserError):
    """A UserError of which nothing in the program is the cause, but a rank that is silent or dead:
    started again it may go on."""


class SharedLoss(SharedError):
    """A SharedError of which nothing in the program is the cause, but ranks that have died."""


class Preempted(SystemExit):
    """All ranks leave, since they were asked to, and their state is saved: exit code 75."""

    def __init__(self) -> None:
        super().__init__(os.EX_TEMPFAIL)


class NotFinite(str):
    """That numbers are not finite, in one line: where that is all, it becomes a `DivergedError`."""

    __slots__ = ()


class SharedProblem(str):
    """What has gone wrong, in one line that names its ranks: all of them have been told, or soon
    are. `Communicator.raise_together` adds nothing to it."""

    __slots__ = ()
