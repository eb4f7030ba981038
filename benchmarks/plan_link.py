"""What TCP costs between two hosts: the latency of a message, and a core's time for it."""

from __future__ import annotations

import statistics
import time

import numpy as np

from parallel_sgd import Communicator

MESSAGES = 200
LARGE = 16 << 20  #: bytes
ROUNDS = 9


def measure(comm: Communicator) -> dict[str, float]:
    """What each of two ranks runs: the fields of a `Link`, medians over the rounds.

    Both ranks send at once, each with a core of its own, so what a message or a byte takes is what
    its sender and its receiver spend on it.
    """
    from mpi4py import MPI

    world, peer = MPI.COMM_WORLD, 1 - comm.rank
    few, many = np.zeros(8, np.uint8), np.zeros(LARGE, np.uint8)
    into = [np.empty_like(few) for _ in range(MESSAGES)]
    large = np.empty_like(many)

    def ping_pong() -> None:
        for _ in range(MESSAGES):
            if comm.rank == 0:
                world.Send(few, peer)
                world.Recv(into[0], peer)
            else:
                world.Recv(into[0], peer)
                world.Send(few, peer)

    def messages() -> None:
        receives = [world.Irecv(buffer, peer) for buffer in into]
        MPI.Request.Waitall([*receives, *(world.Isend(few, peer) for _ in into)])

    def both_ways() -> None:
        world.Sendrecv(many, peer, recvbuf=large, source=peer)

    def median_s(call: object) -> float:
        assert callable(call)
        call()
        seconds = []
        for _ in range(ROUNDS):
            comm.barrier()
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    return {
        "latency_s": median_s(ping_pong) / (2 * MESSAGES),
        "message_s": median_s(messages) / MESSAGES,
        "core_s_per_byte": median_s(both_ways) / LARGE,
    }
