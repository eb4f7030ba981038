"""The peers: workers and one server as they are written with mpi4py in a few lines."""

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
    """All ranks are here; those that wait leave the cores to the others."""
    from mpi4py import MPI

    request = (comm or MPI.COMM_WORLD).Ibarrier()
    while not request.Test():
        time.sleep(2e-3)


def median_rates(
    comm: Communicator, cases: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, float]:
    """The rate of all ranks together in each case: medians of rounds, after one to warm up.

    A rank without a part in a case waits quietly: in an allgather it would spin beside the others.
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
    """Steps a second of this worker, while all of them go on for so long. Collective."""
    for _ in range(warm_up):
        step()
    workers.barrier()
    steps, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        step()
        steps += 1
    return steps / (now - begin)


class Exchange:
    """What a worker sends and what the server answers, of so many bytes, a multiple of 4.

    Args:
        change: what the server does with both before it answers.
    """

    def __init__(
        self, sent: int, answered: int, change: Callable[[Array, Array], object] | None = None
    ) -> None:
        self.sent, self.answered = _ones(sent), _ones(answered)
        self.change = change


def _ones(nbytes: int) -> Array:
    """Bytes of float32 that are 1: memory that nobody has written to is read faster."""
    array = memory.empty(nbytes // 4, np.float32)
    array.fill(1)
    return array.view(np.uint8)


def bare_worker(
    workers: Communicator, server: int, exchanges: Sequence[Exchange], seconds: float
) -> float:
    """Send and receive; returns this worker's steps a second, of all exchanges in each."""
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
    """Receive from anybody, and answer; until all workers have said the end."""
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
