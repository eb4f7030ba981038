"""How fast the links between hosts are, measured before training."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..communication import Communicator
from ..communication.messages import PIECE_BYTES
from .model import Link

SMALL, LARGEST = 1 << 18, 1 << 25  #: bytes of a message; the first are more than links take at once
ENOUGH_S = 0.05  #: a message that takes so long says enough
ROUNDS = 20  #: of a message of a few bytes


def measure_link(comm: Communicator, hosts: Sequence[Sequence[int]]) -> Link:
    """The slowest host's link, while all hosts send and receive at once, in a ring.

    Args:
        hosts: the ranks of each.

    With a single host it is the memory between ranks. Collective; the same on all ranks. Cost:
    some tenths of a second, less on fast links.
    """
    ring = hosts if len(hosts) > 1 else [(rank,) for rank in range(comm.size)]
    place = next(i for i, ranks in enumerate(ring) if comm.rank in ranks)
    parallel_ranks = min(len(ranks) for ranks in ring)  # senders of each host, at the same time
    lane = ring[place].index(comm.rank)
    to = from_ = None
    if lane < parallel_ranks:
        to, from_ = ring[(place + 1) % len(ring)][lane], ring[place - 1][lane]
    few = min(_pass_on(comm, to, from_, 8) for _ in range(ROUNDS))

    def steady(nbytes: int) -> float:
        _pass_on(comm, to, from_, SMALL)  # what a link takes at once after a rest
        return _pass_on(comm, to, from_, nbytes)

    nbytes, seconds = SMALL, steady(SMALL)
    while seconds < ENOUGH_S and nbytes < LARGEST:
        nbytes *= 4
        seconds = steady(nbytes)
    largest = min(seconds, *(steady(nbytes) for _ in range(2)))
    rate = parallel_ranks * nbytes / max(largest - few, 1e-9)
    return Link(few, rate)


def _pass_on(comm: Communicator, to: int | None, from_: int | None, nbytes: int) -> float:
    """Seconds of the slowest rank to send so much to the next rank, and receive it from another."""
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
