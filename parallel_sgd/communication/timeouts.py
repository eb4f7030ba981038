"""Longest wait of a rank for all ranks, from the program or the environment. Local."""

from __future__ import annotations

import os

from ..errors import UserError
from ..validation import number, shown
from .job_environment import WAIT_TIMEOUT_S

TIMEOUT_S = 600.0
"""Default longest wait for other ranks before a rank ends the job, in seconds."""

LONGEST_S = 1e8  #: three years, about the limit of clocks and locks


def checked_timeout(timeout_s: float) -> float:
    """Check a timeout in seconds, and return it. Local.

    Raises:
        UserError: not a number above 0, or larger than `LONGEST_S`.
    """
    timeout_s = number("timeout_s", timeout_s, 0, most=LONGEST_S)
    if timeout_s == 0:
        raise UserError("timeout_s=0 must be more than 0 seconds")
    return timeout_s


def default_timeout() -> float:
    """Return the timeout from the environment, or `TIMEOUT_S`. Local.

    Raises:
        UserError: the environment's value is not a number of seconds.
    """
    given = os.environ.get(WAIT_TIMEOUT_S)
    if given is None:
        return TIMEOUT_S
    try:
        return checked_timeout(float(given))
    except ValueError:
        raise UserError(
            f"{WAIT_TIMEOUT_S}={shown(given)} must be a number of seconds above 0"
        ) from None
