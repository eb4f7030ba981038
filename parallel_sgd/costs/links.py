"""Measurement of the links between hosts, before training."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..communication import Communicator
from ..communication.messages import PIECE_BYTES
from .model import Link

SMALL, LARGEST = 1 << 18, 1 << 25  #: bytes of a message; SMALL exceeds a link's burst capacity
LONG_ENOUGH_S = 0.05  #: duration of a message for an accurate rate
ROUNDS = 20  #: repetitions of the 8-byte message


def measure_link(comm: Communicator, hosts: Sequence[Sequence[int]]) -> Link:
    """Measure the slowest host's link, while all hosts send and receive in a ring.

    Args:
        comm: the ranks.
        hosts: the ranks of each host.
    Returns:
        Latency and rate, the same on all ranks. For a single host, those of the memory between
        ranks.

    Collective. Cost: some tenths of a second, less on fast links.
    """
    ring = hosts if len(hosts) > 1 else [(rank,) for rank in range(comm.size)]
    place = next(i for i, ranks in enumerate(ring) if comm.rank in ranks)
    parallel_ranks = min(len(ranks) for ranks in ring)  # senders of each host, at the same time
    lane = ring[place].index(comm.rank)
    to = from_ = None
    if lane < parallel_ranks:
        to, from_ = ring[(place + 1) % len(ring)][lane], ring[place - 1][lane]
    latency_s = min(_pass_on(comm, to, from_, 8) for _ in range(ROUNDS))

    def steady(nbytes: int) -> float:
        _pass_on(comm, to, from_, SMALL)  # fills the link's burst capacity
        return _pass_on(comm, to, from_, nbytes)

    nbytes, seconds = SMALL, steady(SMALL)
    while seconds < LONG_ENOUGH_S and nbytes < LARGEST:
        nbytes *= 4
        seconds = steady(nbytes)
    largest = min(seconds, *(steady(nbytes) for _ in range(2)))
    rate = parallel_ranks * nbytes / max(largest - latency_s, 1e-9)
    return Link(latency_s, rate)


def _pass_on(comm: Communicator, to: int | None, from_: int | None, nbytes: int) -> float:
    """Return the slowest rank's seconds to send `nbytes` to rank `to` while receiving as many from
    `from_`. Collective.
    """
    sent, received = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    messages = comm.messages()
    backoff = messages.backoff()
    comm.barrier()
    begin = time.perf_counter()
    if to is not None and from_ is not None:
        for begins in range(0, nbytes, PIECE_BYTES):
            piece = slice(begins, begins + PIECE_BYTES)
            messages.receive(received[piece], from_, 0, lambda: None)
            messages.send(sent[piece], to, 0, lambda: None)
    messages.enter()
    with messages.watched("the measurement of links"):
        while messages.under_way:
            if not messages.progress():
                backoff.pause()
    slowest: float = max(comm.allgather_object(time.perf_counter() - begin))
    return slowest
