"""The peers: workers and a server in a few lines of mpi4py."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallel_sgd import Communicator
from parallel_sgd.kernels import memory

if TYPE_CHECKING:  # the process that starts the ranks is none itself
    from mpi4py import MPI

Array = npt.NDArray[Any]

WARM_UP = 3  #: steps before the clock starts
END = 99  #: tag of a worker's last message


def quiet_barrier(comm: MPI.Comm | None = None) -> None:
    """Wait for all ranks; waiting leaves the cores free."""
    from mpi4py import MPI

    request = (comm or MPI.COMM_WORLD).Ibarrier()
    while not request.Test():
        time.sleep(2e-3)


def median_rates(
    comm: Communicator, cases: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, float]:
    """Return the rate of all ranks together in each case: medians of rounds, after a warm-up.

    A rank without a part in a case waits quietly: an allgather would spin beside the working ranks.
    """
    totals: dict[str, list[float]] = defaultdict(list)
    for i in range(rounds + 1):
        for name, case in cases.items():
            quiet_barrier()
            own = case()
            quiet_barrier()
            rates = comm.allgather_object(own)
            if i > 0:
                totals[name].append(sum(rates))
    return {name: statistics.median(of_case) for name, of_case in totals.items()}


def rate(
    workers: Communicator, step: Callable[[], object], seconds: float, warm_up: int = WARM_UP
) -> float:
    """Return this worker's steps a second, while all workers take steps. Collective."""
    for _ in range(warm_up):
        step()
    workers.barrier()
    steps, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        step()
        steps += 1
    return steps / (now - begin)


class Exchange:
    """A worker's message and the server's answer, in bytes, multiples of 4.

    Args:
        change: called by the server with both before the answer.
    """

    def __init__(
        self, sent: int, answered: int, change: Callable[[Array, Array], object] | None = None
    ) -> None:
        self.sent, self.answered = _ones(sent), _ones(answered)
        self.change = change


def _ones(nbytes: int) -> Array:
    """Return bytes of float32 ones: memory never written to is read faster."""
    array = memory.empty(nbytes // 4, np.float32)
    array.fill(1)
    return array.view(np.uint8)


def bare_worker(
    workers: Communicator, server: int, exchanges: Sequence[Exchange], seconds: float
) -> float:
    """Send and receive; return this worker's steps a second, with all exchanges in each step."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def step() -> None:
        for tag, exchange in enumerate(exchanges):
            world.Send(exchange.sent, server, tag)
            world.Recv(exchange.answered, server, tag)

    steps_per_s = rate(workers, step, seconds)
    world.Send(np.empty(0, np.uint8), server, END)
    return steps_per_s


def bare_server(workers: int, exchanges: Sequence[Exchange]) -> None:
    """Receive from any worker, and answer, until the end of all workers."""
    from mpi4py import MPI

    world, status = MPI.COMM_WORLD, MPI.Status()
    incoming = max((exchange.sent for exchange in exchanges), key=len)
    while workers:
        world.Recv(incoming, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        tag = status.Get_tag()
        if tag == END:
            workers -= 1
            continue
        exchange = exchanges[tag]
        if exchange.change is not None:
            exchange.change(incoming, exchange.answered)
        world.Send(exchange.answered, status.Get_source(), tag)
