"""Sums of metrics over this rank's batches, for means over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import UserError
from ..training.session.batches import Samples, is_leaf, samples_in
from ..training.session.objective import numbers_of
from ..validation import function, kind_of

Score = Callable[..., Mapping[str, Any]]
"""Maps a module and the parts of a batch to the mean of each metric over its samples, by name."""


def sums_over(
    batches: Iterable[Any], model: Any, score: Score, samples: Samples | None = None
) -> tuple[dict[str, float], int]:
    """Return this rank's sum of each metric, and its number of samples. Local.

    Args:
        batches: this rank's batches.
        model: the first argument of `score`.
        score: see `Score`.
        samples: maps a batch to its number of samples; None: see
            `training.session.batches.samples_in`.
    Raises:
        UserError: an argument is not as required, the samples of a batch cannot be counted, or the
            names of the metrics differ between batches.
    """
    try:
        each = iter(batches)  # works with __getitem__ alone, too
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
        if count == 0:  # the mean is not a number
            continue
        values = numbers_of("score", score(model, *parts_of(batch)))
        if sums and values.keys() != sums.keys():
            raise UserError(
                f"score returned {sorted(values)} for a batch, but {sorted(sums)} before"
            )
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value * count
        total += count
    return sums, total


def parts_of(batch: Any) -> list[Any]:
    """Return the arguments that a score gets for a batch: its parts, or the undivided batch.
    Local.
    """
    return [*batch] if isinstance(batch, tuple | list) and not is_leaf(batch) else [batch]
