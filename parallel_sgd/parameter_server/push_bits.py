"""Bits of pushes that are chosen by a measurement before training."""

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
    """The bits with which pushes to the server that holds most should be answered soonest; and what
    says so.

    Args:
        world: workers and servers.
        parameters: the model.
        largest: how many of its values that server holds.
        workers: how many there are.
        block_size: of the codecs.
        possible: what may be chosen.

    Collective; the same on all ranks. Cost: some tenths of a second for the links and the kernels;
    nothing, and nothing is measured, for one rank, and where only 32 bits are possible.
    """
    if parameters.dtype != np.float32 or world.size == 1 or largest == 0:
        return 32, None
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts):
        ranks_of.setdefault(host, []).append(rank)
    hosts = list(ranks_of.values())
    measured = measure(world, hosts, block_size, parameters.flat, possible)
    return best_push_bits(largest, workers, measured, possible), measured
