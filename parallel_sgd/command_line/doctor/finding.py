"""The result of a check of `parallel-sgd doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        check: the name of the check, a single word.
        level: "ok"; "warning": possibly slow or surprising; "problem": wrong.
        says: the result, in one line.
        advice: the remedy, in one line; "" if the level is "ok".
    """

    check: str
    level: Level
    says: str
    advice: str = ""


def ok(check: str, says: str) -> list[Finding]:
    return [Finding(check, "ok", says)]


def by_value(values: Mapping[str, object] | Sequence[tuple[str, object]]) -> str:
    """Return hosts grouped by their values, in words: "2.4.1 on a, b; 2.3.0 on c"."""
    pairs = values.items() if isinstance(values, Mapping) else values
    hosts: dict[object, list[str]] = {}
    for host, value in pairs:
        hosts.setdefault(value, []).append(host)
    return "; ".join(f"{value} on {shortened(names)}" for value, names in hosts.items())


def shortened(names: Sequence[str], most: int = 4) -> str:
    """Return the first names, and the number of further names, in words."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
