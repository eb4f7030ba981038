"""Our side over links: an MPI rank on each host, with our exchanges and MPI_Allreduce."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from parallel_sgd import Communicator, Parameters
from parallel_sgd.algorithms import ExchangeState
from parallel_sgd.communication.entry_point import abort_on_error
from parallel_sgd.exchange import ExchangeOptions

from ..training.member import follow
from .cases import ALLREDUCE, AUTO, OURS, Array, turn, vector_of


class Ours:
    """A rank at the conductor's commands."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.given: Array
        self.calls: dict[str, Callable[[], object]] = {}

    def begin(self, values: int) -> dict[str, Any]:
        """Take up vectors of `values` values; return the choice of "auto"."""
        self.given = vector_of(self.comm.rank, values)
        parameters = Parameters({"W": self.given})
        self.total: Array = parameters.like().flat
        self.calls = {ALLREDUCE: lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self.total)}
        given: dict[str, dict[str, Any]] = {
            name: {"gradient_bits": bits, **options} for name, (bits, options) in OURS.items()
        }
        given[AUTO] = {"gradient_bits": AUTO}
        for name, arguments in given.items():
            exchange = ExchangeState.init(
                ExchangeOptions(**arguments), parameters, lambda: 0, self.comm
            )
            self.calls[name] = partial(exchange.sum, self.total)
        return {"auto": exchange.report()}

    def sums(self, name: str, times: int) -> dict[str, Any]:
        """Take a case's turn."""
        comm, call = self.comm, self.calls[name]
        return turn(self.given, self.total, comm.size, times, comm.barrier, call)


def main(path: str) -> None:
    comm = Communicator.world()
    follow(Ours(comm), comm.rank, path, "ours")


if __name__ == "__main__":
    with abort_on_error():
        main(sys.argv[1])
