"""Answers that a server keeps back: who waits for what, and where nobody can ever go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from ..communication import WHOLE_MINIBATCH
from ..communication.phrases import different_values, in_words
from .requests import Request
from .wire import Kind

WAITS = {
    Kind.PUSH: "for the answer to its push {clock} (mode={mode!r})",
    Kind.SUM_SAMPLES: "in step() for the samples of all",
    Kind.AGREE_ON_WHOLE: "in step() before distributed_after for all",
    Kind.MEET: "in meet() or Checkpoints.save() for all",
    Kind.LEAVE: "in finish() for all",
}


def of_kind(kept: Mapping[int, Request], kind: Kind) -> set[int]:
    """The workers that wait for an answer to such a request."""
    return {worker for worker, request in kept.items() if request.message.kind == kind}


def disagreement(kept: Mapping[int, Request], ranks: Sequence[int]) -> str | None:
    """Why workers that all have the same minibatch cannot go on, in one line; None where they may.

    Args:
        kept: the request of each with its samples, by worker.
        ranks: of every worker in the world.
    """
    samples = [str(request.message.samples) for request in kept.values()]
    return different_values(WHOLE_MINIBATCH, samples, [ranks[worker] for worker in kept])


def deadlock(
    kept: Mapping[int, Request],
    busy: Collection[int],
    ranks: Sequence[int],
    clocks: Sequence[int],
    mode: str,
) -> str | None:
    """Why training cannot go on, in one line; None where it may.

    It cannot where all workers wait, so that none will ask for what another waits for; and where
    one is at a meeting of all that another, which has finished, never comes to.

    Args:
        kept: requests that wait, of which none can be answered now, by worker.
        busy: workers that do not wait.
        ranks, clocks: of every worker, its rank in the world and its pushes.
    """
    met_by_all = not (of_kind(kept, Kind.MEET) and of_kind(kept, Kind.LEAVE))
    if not kept or (busy and met_by_all):
        return None
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    for worker, request in sorted(kept.items()):
        what = WAITS[request.message.kind].format(clock=clocks[worker], mode=mode)
        waiting[what].append(ranks[worker])
    states = "; ".join(
        f"{in_words(those)} wait{'s' * (len(those) == 1)} {what}" for what, those in waiting.items()
    )
    return (
        f"training cannot go on, since workers wait for each other: {states}; every worker must "
        "take as many steps as the others, and meet, save and finish where they do"
    )
