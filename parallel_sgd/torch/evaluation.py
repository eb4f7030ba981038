"""Means over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import UserError
from ..training.session.batches import Samples, is_leaf, samples_in
from ..training.session.objective import numbers_of
from ..validation import function, kind_of

Score = Callable[..., Mapping[str, Any]]
"""Given a module and a batch, the mean of each metric over its samples, by name."""


def sums_over(
    batches: Iterable[Any], model: Any, score: Score, samples: Samples | None = None
) -> tuple[dict[str, float], int]:
    """This rank's sum of each metric, and its number of samples. Local.

    Args:
        samples: counts those of a batch; None: see `training.batches.samples_in`.
    Raises:
        UserError: an argument is not as required; the samples of a batch cannot be counted; or its
            metrics are other ones than those before it.
    """
    try:
        each = iter(batches)  # also of an object that has __getitem__ alone
    except TypeError:
        raise UserError(
            f"batches must be an iterable, such as a DataLoader or a list: it is {kind_of(batches)}"
        ) from None
    function("score", score, "of a model and a batch's parts")
    if samples is not None:
        function("samples", samples, "of a batch")
    sums: dict[str, float] = {}
    total = 0
    for batch in each:
        count = samples_in(batch, samples)
        if count == 0:  # of which no mean is a number
            continue
        values = numbers_of("score", score(model, *parts_of(batch)))
        if sums and values.keys() != sums.keys():
            raise UserError(f"score gave {sorted(values)} of a batch, and {sorted(sums)} before")
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value * count
        total += count
    return sums, total


def parts_of(batch: Any) -> list[Any]:
    """What a score is given of a batch: its parts, or itself where it has none. Local."""
    return [*batch] if isinstance(batch, tuple | list) and not is_leaf(batch) else [batch]
