"""Compute means over the samples of all ranks. Each rank computes a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ...communication import Communicator
from ...data import Dataset, Sequences
from ...errors import SharedError, UserError
from ...validation import function, kind_of
from .batches import Samples, is_leaf, samples_in
from .objective import Objective, numbers_of

Score = Callable[..., Mapping[str, Any]]
"""Maps a module and the parts of a batch to the mean of each metric over its samples, by name."""


def weighted_means(comm: Communicator, sums: Mapping[str, float], samples: int) -> dict[str, float]:
    """Return the means over all ranks' samples, the same on all ranks. Collective.

    Args:
        sums: this rank's sum of every metric, by name.
        samples: this rank's samples.
    Raises:
        SharedError: the ranks have different metrics, or no samples at all.
    """
    gathered = comm.allgather_object((dict(sums), samples))
    with_samples = [remote for remote in gathered if remote[1]]
    names = {tuple(remote) for remote, _ in with_samples}
    if len(names) > 1:
        comm.require_agreement({"metrics": tuple(sums)})
    if not with_samples:
        comm.raise_together("no rank has a sample to evaluate on")
    total = sum(count for _, count in with_samples)
    return {name: sum(s[name] for s, _ in with_samples) / total for name in with_samples[0][0]}


def evaluate(
    objective: Objective, data: Dataset | Sequences, comm: Communicator, *, batch: int
) -> dict[str, float]:
    """Return the mean of every metric over a data set. Each rank of `comm` reads a part.

    Args:
        data: the same on all ranks. A rank's part may be empty.
        batch: samples to read and compute at a time.
    Raises:
        SharedError: on all ranks, if a sample is bad or a metric fails on any rank.

    Collective.
    """
    indexes_of_rank = np.arange(len(data))[comm.rank :: comm.size]

    def summed() -> tuple[dict[str, Any], int]:
        sums: dict[str, Any] = {}
        samples = 0
        for first in range(0, len(indexes_of_rank), batch):
            indexes = indexes_of_rank[first : first + batch]
            read = data.read(indexes, dtype=objective.dtype, classes=objective.classes)
            for name, value in objective.sums(read).items():
                sums[name] = sums.get(name, 0.0) + value
            samples += objective.samples_of(read)
        return sums, samples

    found = comm.allgather_object(comm.together(summed))
    gathered = [sums for sums, _ in found if sums]
    if any(sums.keys() != gathered[0].keys() for sums in gathered):
        raise SharedError(f"metrics must be the same on all ranks: {sorted(map(sorted, gathered))}")
    totals = {name: sum(sums[name] for sums in gathered) for name in gathered[0]}
    return objective.scores(totals, sum(samples for _, samples in found))


def sums_over(
    batches: Iterable[Any], model: Any, score: Score, samples: Samples | None = None
) -> tuple[dict[str, float], int]:
    """Return this rank's sum of each metric, and its number of samples. Local.

    Args:
        batches: this rank's batches.
        model: the first argument of `score`.
        score: see `Score`.
        samples: maps a batch to its number of samples; None: see
            `samples_in`.
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
