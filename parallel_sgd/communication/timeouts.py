"""The longest wait of a rank for the others, as programs and the environment give it. Local."""

from __future__ import annotations

import os

from ..errors import UserError
from ..validation import number, shown
from .job_environment import WAIT_TIMEOUT_S

TIMEOUT_S = 600.0
"""Longest wait for the other ranks before a rank gives up and ends the job."""

LONGEST_S = 1e8  #: three years, about what clocks and locks still take


def checked_timeout(timeout_s: float) -> float:
    """A number of seconds to wait at most; raises a UserError where it is none. Local."""
    timeout_s = number("timeout_s", timeout_s, 0, most=LONGEST_S)
    if timeout_s == 0:
        raise UserError("timeout_s=0 must be more than 0 seconds")
    return timeout_s


def default_timeout() -> float:
    """The longest wait where a program does not say: in the environment, or `TIMEOUT_S`. Local.

    Raises:
        UserError: what the environment says is no number of seconds.
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
