"""Predictions of the cost model, also for more workers than this machine can emulate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel_sgd.costs import KernelSpeeds, Link
from parallel_sgd.planning import Job

from .contenders import BATCH, CONTENDERS, model

MORE = (2, 4, 8, 16, 32, 64)  #: workers, with those that are measured


@dataclass(frozen=True)
class Predicted:
    """
    Attributes:
        contender, workers: of the prediction.
        samples_per_s: of all workers, without evaluations.
    """

    contender: str
    workers: int
    samples_per_s: float


def predict(
    names: Iterable[str], workers: Sequence[int], step_s: float, link: Link, speeds: KernelSpeeds
) -> list[Predicted]:
    """Predict all contenders known to the planner, on hosts with a core each.

    Args:
        step_s: of a single worker.
        link: of every host.
    """
    predicted = []
    for name in names:
        contender = CONTENDERS[name]
        if contender.candidate is None:
            continue
        for k in workers:
            job = Job(
                nodes=k + contender.servers,
                ranks_per_node=1,
                link=link,
                parameters=model().parameters.flat.size,
                step_s=step_s,
                minibatch=BATCH,
                optimizer_vectors=1,
                speeds=speeds,
            )
            seconds = contender.candidate.cost(job).total_s
            predicted.append(Predicted(name, k, k * BATCH / seconds))
    return predicted
