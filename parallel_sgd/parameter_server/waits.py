"""Held answers of a server: detection of deadlocks and of disagreement."""

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


def of_kind(held: Mapping[int, Request], kind: Kind) -> set[int]:
    """Return the workers that wait for an answer to a request of `kind`."""
    return {worker for worker, request in held.items() if request.message.kind == kind}


def disagreement(held: Mapping[int, Request], ranks: Sequence[int]) -> str | None:
    """Explain in a line why workers with a shared minibatch cannot continue.

    Args:
        held: the requests with their samples, by worker.
        ranks: of every worker in the world.
    Returns:
        The explanation, or None if the samples of all requests are equal.
    """
    samples = [str(request.message.samples) for request in held.values()]
    return different_values(WHOLE_MINIBATCH, samples, [ranks[worker] for worker in held])


def deadlock(
    held: Mapping[int, Request],
    busy: Collection[int],
    ranks: Sequence[int],
    clocks: Sequence[int],
    mode: str,
) -> str | None:
    """Explain in a line why training cannot continue.

    A deadlock has two forms. All workers wait, so no worker will ever send the awaited request. Or
    a worker waits at a meeting of all, and a finished worker will never come.

    Args:
        held: held requests without a possible answer now, by worker.
        busy: workers not waiting.
        ranks, clocks: of every worker: its rank in the world, and its number of pushes.
        mode: of the rules.
    Returns:
        The explanation, or None without a deadlock.
    """
    met_by_all = not (of_kind(held, Kind.MEET) and of_kind(held, Kind.LEAVE))
    if not held or (busy and met_by_all):
        return None
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    for worker, request in sorted(held.items()):
        what = WAITS[request.message.kind].format(clock=clocks[worker], mode=mode)
        waiting[what].append(ranks[worker])
    states = "; ".join(
        f"{in_words(those)} wait{'s' * (len(those) == 1)} {what}" for what, those in waiting.items()
    )
    return (
        f"deadlock: workers wait for each other: {states}; all workers must take the same number "
        "of steps, and meet, save and finish at the same points"
    )
