"""The rank of this process, and how many ranks its launcher has started: mpiexec, or torchrun."""

from __future__ import annotations

import os

from parallel_sgd.communication import launched_rank, launched_size


def own_rank() -> int | None:
    number = os.environ.get("RANK")
    return launched_rank() if number is None else int(number)


def ranks_started() -> int | None:
    number = os.environ.get("WORLD_SIZE")
    return launched_size() if number is None else int(number)
