"""Automatic choice of the bits of pushes, by a measurement before training."""

from __future__ import annotations

import numpy as np

from ..communication import Communicator
from ..costs import Measured, best_push_bits, measure
from ..parameters import Parameters


def choose_push_bits(
    world: Communicator,
    parameters: Parameters,
    largest: int,
    workers: int,
    block_size: int,
    possible: tuple[float, ...],
) -> tuple[float, Measured | None]:
    """Choose the bits for the shortest push to the server with the most values.

    Args:
        world: workers and servers.
        parameters: the model.
        largest: number of values on that server.
        workers: number of workers.
        block_size: of the codecs.
        possible: bits to choose from.
    Returns:
        The bits, and the measurement. The measurement is None if nothing was measured.

    Collective; the same on all ranks. Cost: some tenths of a second to measure links and kernels.
    Nothing is measured on a single rank, for an empty model, or for parameters of other dtypes than
    float32: the result is then 32.
    """
    if parameters.dtype != np.float32 or world.size == 1 or largest == 0:
        return 32, None
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts):
        ranks_of.setdefault(host, []).append(rank)
    hosts = list(ranks_of.values())
    measured = measure(world, hosts, block_size, parameters.flat, possible)
    return best_push_bits(largest, workers, measured, possible), measured
