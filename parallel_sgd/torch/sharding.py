"""The ranks with parts of a model, and their peers: the ranks of other hosts with equal parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..communication import Communicator
from ..errors import UserError


class Sharding:
    """The division of a model among the ranks of each host.

    Args:
        mesh: PyTorch's DeviceMesh of one dimension: the ranks with parts of this rank's model.

    Attributes:
        shard, shards: this rank's number in the mesh, and the number of ranks there.

    Local.
    """

    def __init__(self, mesh: Any) -> None:
        self._first = int(mesh.mesh.min())  # the number of the host
        self.shard, self.shards = int(mesh.get_local_rank()), int(mesh.size())
        self._joined: tuple[Communicator, Communicator, Communicator] | None = None

    def join(self, comm: Communicator, refuse: Callable[[], None]) -> Communicator:
        """Return this rank's peers, one on each host, as a communicator.

        A problem of any rank of `comm` is found by `agree` on all ranks of `comm`.

        Args:
            comm: the ranks of all hosts, numbered as in PyTorch's default process group.
            refuse: raises a UserError if training is not possible.
        Raises:
            SharedError: on all ranks: from `refuse`, or the ranks are not hosts with a whole model
                each.

        Collective.
        """

        def checked() -> None:
            comm.require_fixed_ranks(
                "ShardedModel: PyTorch's process group cannot continue without a failed rank: run "
                "without --survive"
            )
            own = dist.get_rank(), dist.get_world_size()
            if own != (comm.rank, comm.size):
                raise UserError(
                    f"comm has this process as rank {comm.rank} of {comm.size}, and PyTorch's "
                    f"process group as rank {own[0]} of {own[1]}: both must be the same"
                )
            if self._joined is not None:
                raise UserError(
                    "model belongs to another learner already: close that learner first"
                )
            refuse()

        comm.together(checked)
        comm.require_agreement({"number of ranks that share a model": self.shards})
        host, peers = comm.split(self._first), comm.split(self.shard)
        comm.raise_together(
            None
            if host.size == self.shards and peers.size * self.shards == comm.size
            else f"{self.shards} ranks share a model, of which comm has {host.size}: the ranks of "
            "comm must be hosts with a whole model each"
        )
        self._joined, peers.wider = (comm, host, peers), comm
        return peers

    def leave(self) -> None:
        """Free the communicators of `join`. Collective, but waits for no rank."""
        if self._joined is not None:
            _, host, peers = self._joined
            self._joined = None
            host.close()
            peers.close()

    @property
    def ranks(self) -> Communicator:
        """All ranks of all hosts, after `join`. Local."""
        assert self._joined is not None
        return self._joined[0]

    def norm(self, vector: torch.Tensor) -> float:
        """Return the norm of a vector divided among the ranks of the host.

        Args:
            vector: [n] this rank's part.

        Collective over the ranks of the host, summed in their order: equal on all hosts if the
        vectors are.
        """
        assert self._joined is not None
        _, host, _ = self._joined
        own = float(torch.linalg.vector_norm(vector)) ** 2
        squares = np.empty(host.size)
        host.allgather(np.array([own]), squares, [1] * host.size)
        return float(np.sqrt(squares.sum()))
