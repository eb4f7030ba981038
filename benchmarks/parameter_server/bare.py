"""The peers: workers and a server in a few lines of mpi4py; and rates of cases in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd import Communicator
from parallel_sgd.kernels import memory

Array = npt.NDArray[Any]
Exchange = tuple[Array, Array]
"""A worker's message and the server's answer, as bytes."""

WARM_UP = 3  #: steps before the clock starts
END = 99  #: tag of a worker's last message


def quiet_barrier() -> None:
    """Wait for all ranks; waiting leaves the cores free."""
    from mpi4py import MPI

    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(2e-3)


def medians(
    comm: Communicator,
    cases: Mapping[str, Callable[[], float]],
    rounds: int,
    barrier: Callable[[], object] = quiet_barrier,
) -> dict[str, list[float]]:
    """Return the rates of all ranks in each case: medians of rounds.

    All cases have their turns in each round; a first round does not count. A rank without a part in
    a case waits quietly: another wait would spin beside the working ranks.

    Args:
        barrier: of the ranks of `comm`.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + rounds):
        for name, case in cases.items():
            barrier()
            found[name].append(case())
    barrier()
    by_rank = comm.allgather_object({name: float(np.median(of[1:])) for name, of in found.items()})
    return {name: [of_rank[name] for of_rank in by_rank] for name in cases}


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


def ones(nbytes: int) -> Array:
    """Return bytes, a multiple of 4, of float32 ones: memory never written to is read faster."""
    array = memory.empty(nbytes // 4, np.float32)
    array.fill(1)
    return array.view(np.uint8)


def bare(
    comm: Communicator,
    workers: int,
    server: int,
    exchanges: Sequence[Exchange],
    seconds: float,
    change: Callable[[Array, Array], object] | None = None,
) -> float:
    """Let the first ranks send to one and receive; return this rank's steps a second, each with all
    exchanges.

    Args:
        change: called by the server with a message and its answer before it answers.
    """
    from mpi4py import MPI

    world, status = MPI.COMM_WORLD, MPI.Status()
    active = comm.split(int(comm.rank < workers))
    if comm.rank < workers:

        def step() -> None:
            for tag, (sent, answered) in enumerate(exchanges):
                world.Send(sent, server, tag)
                world.Recv(answered, server, tag)

        steps_per_s = rate(active, step, seconds)
        world.Send(np.empty(0, np.uint8), server, END)
        return steps_per_s
    incoming, left = max((sent for sent, _ in exchanges), key=len), workers
    while comm.rank == server and left:
        world.Recv(incoming, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        tag = status.Get_tag()
        if tag == END:
            left -= 1
            continue
        _, answered = exchanges[tag]
        if change is not None:
            change(incoming, answered)
        world.Send(answered, status.Get_source(), tag)
    return 0.0
