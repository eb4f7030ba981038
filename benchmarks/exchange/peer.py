"""PyTorch's side over links: a process on each host, all_reduce over gloo, in place.

Started with rank, number of ranks, the first host's address and the conductor's socket.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from ..training.member import follow
from ..training.modules import gloo
from .cases import Array, turn, vector_of


class Peer:
    """A process at the conductor's commands."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.given: Array

    def begin(self, values: int) -> dict[str, Any]:
        """Take up vectors of `values` values."""
        self.given = vector_of(self.rank, values)
        self.total = torch.empty(values)
        return {}

    def sums(self, name: str, times: int) -> dict[str, Any]:
        """Take the turn of the only case."""
        total = self.total

        def call() -> None:
            dist.all_reduce(total)

        return turn(self.given, total.numpy(), self.ranks, times, dist.barrier, call)


def main(rank: str, ranks: str, address: str, path: str) -> None:
    with gloo(int(rank), int(ranks), address):
        follow(Peer(int(rank), int(ranks)), int(rank), path, "peer")


if __name__ == "__main__":
    main(*sys.argv[1:])
