"""The recommended algorithm for a job, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..algorithms import BlockMomentumSGD
from ..costs import TOLERANCE
from .candidates import FEWEST_BITS, Blocks, Candidate, DataParallel, candidates
from .job import Job

WORTHWHILE_SPEEDUP = 1.25  #: minimum for an algorithm with results unlike serial SGD's


@dataclass(frozen=True)
class Recommendation:
    """A recommended algorithm.

    Attributes:
        choice: the recommended candidate.
        options: of train.py.
        reason: two sentences: the advantage, and a caveat.
    """

    choice: Candidate
    options: str
    reason: str


def recommend(job: Job) -> Recommendation:
    """Recommend the fastest algorithm equivalent to serial SGD, unless another is much faster.

    Among candidates within 5 % of the fastest, those without overlap are preferred, then those with
    the most bits. Local.
    """
    every = candidates(job)
    usual = [c for c in every if isinstance(c, DataParallel) and c.bits > FEWEST_BITS]
    base = _simplest_of_fastest(usual, job)
    blocks = _simplest_of_fastest(
        [c for c in every if isinstance(c, Blocks) and c.algorithm is BlockMomentumSGD], job
    )
    efficiency, faster = base.cost(job).efficiency, blocks.cost(job).efficiency
    if faster < WORTHWHILE_SPEEDUP * efficiency:
        rest = (
            f"; block momentum would keep {faster:.0%}" if faster > TOLERANCE * efficiency else ""
        )
        return Recommendation(
            base,
            _options(base, job),
            f"{title(base)} keeps {efficiency:.0%} of the speed of {_nodes(job)}, within 5 % of "
            f"the fastest algorithm that trains as serial SGD does{rest}. {_notes(base)} a "
            f"minibatch of {job.ranks * job.minibatch} samples needs its own learning rate.",
        )
    return Recommendation(
        blocks,
        _options(blocks, job),
        f"{title(blocks)} keeps {faster:.0%} of the speed of {_nodes(job)}; gradients in every "
        f"step keep at most {efficiency:.0%} ({title(base)}). The result differs from serial "
        "SGD's: after the same samples on 64 ranks the loss was 0.45 nats above (model "
        "averaging: 0.77), with blocks of 4 bits as with 32; 1-bit signs were unstable there "
        "(docs/experiments.md).",
    )


def sensitivity(job: Job, chosen: Candidate) -> list[tuple[str, Candidate]]:
    """Return different recommendations for half and twice the measured kernel speeds.

    Measured kernels are slow under load. Local.

    Returns:
        A list of (change of speed, recommended candidate), without candidates equal to `chosen`.
    """
    found = []
    for factor, how in ((0.5, "half as fast"), (2.0, "twice as fast")):
        other = recommend(replace(job, speeds=job.speeds.times(factor))).choice
        if other != chosen:
            found.append((how, other))
    return found


def title(candidate: Candidate) -> str:
    """Return a candidate's name with the bits."""
    return f"{candidate.name}, {candidate.bits} bit"


def _simplest_of_fastest(among: Sequence[Candidate], job: Job) -> Candidate:
    """Return the first candidate within 5 % of the fastest."""
    seconds = [c.cost(job).total_s for c in among]
    limit = TOLERANCE * min(seconds)
    return next(c for c, total_s in zip(among, seconds, strict=True) if total_s <= limit)


def _options(choice: Candidate, job: Job) -> str:
    words = [choice.options, f"--gradient-bits {choice.bits:g}"]
    buckets = choice.cost(job).buckets
    if buckets < job.bucket_counts[0]:
        words.append(f"--bucket-values {-(-job.parameters // buckets)}")
    return " ".join(word for word in words if word)


def _notes(base: Candidate) -> str:
    if base.bits == 32:
        return "The result is that of serial SGD on larger minibatches, but"
    trained = "4 bits and more" if base.bits >= 4 else f"{base.bits:g} bit"
    return (
        f"With error feedback, which is on by default, {trained} trained as well as 32 "
        "(docs/experiments.md), and"
    )


def _nodes(job: Job) -> str:
    return "one node" if job.nodes == 1 else f"{job.nodes} nodes"
