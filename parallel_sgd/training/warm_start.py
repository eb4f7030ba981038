"""The beginning of training in which every rank takes the whole of each minibatch."""

from __future__ import annotations

from ..algorithms import Work
from ..compression import problem_with


def train_alone(work: Work, samples: int, distributed_after: int) -> int:
    """One step of the warm start: all ranks have the same whole minibatch; nothing is exchanged.

    With the last one all ranks go on from rank 0's model: machines may round differently.

    Args:
        samples: of the minibatch; the same on all ranks.
        distributed_after: samples after which the warm start ends.
    Returns:
        The samples.
    Raises:
        SharedError: a gradient is not finite, a rank has failed, or ranks have not as many samples.

    Collective.
    """
    problem, name = (
        problem_with(work.gradient.flat),
        "samples of a minibatch before distributed_after",
    )
    work.comm.agree(problem, samples, alike={name: samples})
    if samples:
        work.optimizer(work.gradient.flat, samples)
    if work.samples >= distributed_after:
        for array in (work.parameters.flat, *work.optimizer.state.buffers.values()):
            work.comm.broadcast(array)
    return samples
