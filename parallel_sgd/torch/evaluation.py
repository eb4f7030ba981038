"""Means over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import UserError
from ..validation import kind_of

Score = Callable[..., Mapping[str, Any]]
"""Given a module and a batch, the mean of each metric over its samples, by name."""


def sums_over(batches: Iterable[Any], model: Any, score: Score) -> tuple[dict[str, float], int]:
    """This rank's sum of each metric, and its number of samples. Local.

    Raises:
        UserError: a batch has no length, or other metrics than those before it.
    """
    sums: dict[str, float] = {}
    samples = 0
    for batch in batches:
        parts = list(batch) if isinstance(batch, tuple | list) else [batch]
        count = samples_in(parts)
        if count == 0:  # of which no mean is a number
            continue
        values = numbers_of(score(model, *parts))
        if sums and values.keys() != sums.keys():
            raise UserError(f"score gave {sorted(values)} of a batch, and {sorted(sums)} before")
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value * count
        samples += count
    return sums, samples


def numbers_of(values: Any) -> dict[str, float]:
    """What a score has given. Local.

    Raises:
        UserError: no mapping from names to numbers.
    """
    if not isinstance(values, Mapping):
        raise UserError(
            "score must give a mapping from the names of metrics to numbers, such as "
            f"{{'loss': loss}}: it gave {kind_of(values)}"
        )
    numbers = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"score gave {kind_of(value)} for {name!r}, which must be one number: its mean "
                "over the batch's samples"
            ) from None
    return numbers


def samples_in(parts: list[Any]) -> int:
    """How many samples a batch has: the length of the first thing in it."""
    first = parts[0] if parts else None
    if isinstance(first, Mapping):
        first = next(iter(first.values()), None)
    try:
        return len(first)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(
            "a batch must begin with a tensor, of which the first axis is that of the samples: it "
            f"is {type(first).__name__}"
        ) from None
