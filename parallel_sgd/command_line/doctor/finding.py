"""What a check has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What one check says.

    Attributes:
        check: its name, one word.
        level: "ok"; "warning": it may be slow, or surprise; "problem": it is wrong.
        says: one line.
        advice: what to do about it, one line; nothing where it is ok.
    """

    check: str
    level: Level
    says: str
    advice: str = ""


def ok(check: str, says: str) -> list[Finding]:
    return [Finding(check, "ok", says)]


def by_value(values: Mapping[str, object] | Sequence[tuple[str, object]]) -> str:
    """Hosts and their values in words: "2.4.1 on a, b; 2.3.0 on c"."""
    pairs = values.items() if isinstance(values, Mapping) else values
    hosts: dict[object, list[str]] = {}
    for host, value in pairs:
        hosts.setdefault(value, []).append(host)
    return "; ".join(f"{value} on {shortened(names)}" for value, names in hosts.items())


def shortened(names: Sequence[str], most: int = 4) -> str:
    """Some names, and how many more."""
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
