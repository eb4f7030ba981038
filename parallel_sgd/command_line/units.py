"""Parse numbers with units on command lines: 10gbit, 30us, 60M."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping

UNLIMITED = "unlimited"

_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]*)", re.IGNORECASE)
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


def bits_per_s(text: str) -> float:
    """Parse the rate of a link, ``100mbit`` or ``2.5gbit``; infinity for ``unlimited``."""
    if text.lower() == UNLIMITED:
        return math.inf
    return _read(text, _RATES, f"a rate such as 100mbit or 1gbit, or {UNLIMITED}", 1e3, 1e15)


def rate_text(rate: float) -> str:
    """Write a rate of at least 1 kbit/s as `bits_per_s` reads it: ``100mbit``, ``unlimited``."""
    if rate == math.inf:
        return UNLIMITED
    unit, factor = max((one for one in _RATES.items() if one[1] <= rate), key=lambda one: one[1])
    return f"{rate / factor:g}{unit}"


def seconds(text: str) -> float:
    """Parse a time, ``30us``, ``1.5ms`` or ``0.2`` (seconds)."""
    return _read(text, _TIMES, "a time such as 30us, 1.5ms or 0.2s", 1e-9, 1e6)


def count(text: str) -> int:
    """Parse a whole number, ``60M`` or ``1024``."""
    number = _read(text, _COUNTS, "a number such as 60M, 250k or 1024", 1, 1e15)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"must be a whole number: {text!r}")
    return int(number)


def _read(text: str, units: Mapping[str, float], what: str, least: float, most: float) -> float:
    match = _NUMBER.fullmatch(text.strip())
    factor = units.get(match.group(2).lower()) if match else None
    if match is None or factor is None or not float(match.group(1)) > 0:
        raise argparse.ArgumentTypeError(f"must be {what}: {text!r}")
    value = float(match.group(1)) * factor
    if not least <= value <= most:
        unit = "" if units is _COUNTS else " bit/s" if units is _RATES else " s"
        raise argparse.ArgumentTypeError(f"must be from {least:g} to {most:g}{unit}: {text!r}")
    return value
