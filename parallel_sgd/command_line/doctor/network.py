"""Measure the exchange rate between each pair of hosts, and the offsets of their clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...communication import Communicator
from ...communication.messages import PIECE_BYTES

WARM_UP, SMALLEST, LARGEST = 1 << 19, 1 << 20, 1 << 25  #: bytes of the messages
ENOUGH_S = 0.05  #: a message this long is measured well enough
ROUNDS, TRIES = 20, 3  #: repetitions of a small message, and of a timed message


@dataclass(frozen=True)
class Pair:
    """The measurement between two hosts, taken at the same time as that of further pairs.

    Attributes:
        hosts: the names of the two hosts.
        bytes_per_s: rates from the first host to the second, and back.
        latency_s: one-way time of a small message.
    """

    hosts: tuple[str, str]
    bytes_per_s: tuple[float, float]
    latency_s: float


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of `count` members in rounds. In a round no member is in two pairs.

    Example::

        >>> rounds_of_pairs(4)
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = list(range(count + count % 2))  # an absent member makes an odd count even
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(p), max(p)) for p in pairs if max(p) < count])
        places[1:] = [places[-1], *places[1:-1]]
    return rounds


def measure_pairs(comm: Communicator, hosts: Sequence[str]) -> list[Pair]:
    """Measure every pair of hosts, by their first ranks. Pairs of the same round share no host.

    Args:
        comm: the ranks.
        hosts: the host of each rank.

    Collective; the same result on all ranks. Cost: some tenths of a second for each host.
    """
    names = list(dict.fromkeys(hosts))
    first_ranks = [list(hosts).index(name) for name in names]
    local: list[Pair] = []
    for pairs in rounds_of_pairs(len(names)):
        comm.barrier()
        for first, second in pairs:
            if comm.rank == first_ranks[first]:
                link = Link(comm, first_ranks[second])
                latency_s = link.latency_s(asks=True)
                there, back = link.rate(sends=True), link.rate(sends=False)
                local.append(Pair((names[first], names[second]), (there, back), latency_s))
            elif comm.rank == first_ranks[second]:
                link = Link(comm, first_ranks[first])
                link.latency_s(asks=False)
                link.rate(sends=False)
                link.rate(sends=True)
    gathered = comm.allgather_object([vars(pair) for pair in local])
    all_pairs = [Pair(**pair) for values in gathered for pair in values]
    return sorted(all_pairs, key=lambda pair: [names.index(name) for name in pair.hosts])


class Link:
    """This rank's side of a measurement between two ranks.

    Both ranks call the same methods: one as the asking or sending side, the other as its peer. No
    wait is longer than the communicator's `timeout_s`.
    """

    def __init__(self, comm: Communicator, peer: int) -> None:
        self._messages, self._peer = comm.messages(), peer

    def latency_s(self, *, asks: bool) -> float:
        """Return half of the shortest round-trip time, in seconds."""
        quickest = np.inf
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            self._ping(asks)
            quickest = min(quickest, time.perf_counter() - begin)
        return float(quickest / 2)

    def rate(self, *, sends: bool) -> float:
        """Return the bytes per second from the sending side; the same on both sides.

        The best of `TRIES` counts for each size of message.
        """
        self._timed(WARM_UP, sends)  # use up the burst that an idle link accepts at once
        nbytes = SMALLEST
        while True:  # several tries: a rank without a core for a moment makes a link look slow
            seconds = min(self._timed(nbytes, sends) for _ in range(TRIES))
            if seconds >= ENOUGH_S or nbytes >= LARGEST:
                return nbytes / max(seconds, 1e-9)
            nbytes *= 4

    def _timed(self, nbytes: int, sends: bool) -> float:
        """Return the seconds measured by the sending side until its peer has all bytes."""
        data = np.zeros(nbytes, np.uint8)
        begin = time.perf_counter()
        self._move(data, sends)
        self._move(np.zeros(1, np.uint8), not sends)
        seconds = np.array([time.perf_counter() - begin])
        self._move(seconds, sends)
        return float(seconds[0])

    def _ping(self, asks: bool) -> None:
        small = np.zeros(8, np.uint8)
        self._move(small, asks)
        self._move(small, not asks)

    def _move(self, array: np.ndarray, sends: bool) -> None:
        messages, backoff = self._messages, self._messages.backoff()
        move = messages.send if sends else messages.receive
        step = max(1, PIECE_BYTES // array.itemsize)
        for begin in range(0, array.size, step):
            move(array[begin : begin + step], self._peer, 0, lambda: None)
        with messages.watched("the measurement of a pair of hosts"):
            while messages.under_way:
                if not messages.progress():
                    backoff.pause()


def clock_offsets(comm: Communicator) -> list[float]:
    """Return each rank's clock minus the first rank's, in seconds, to within the time of a barrier.

    Collective; the same result on all ranks.
    """
    best: list[float] | None = None
    shortest = np.inf
    for _ in range(5):
        comm.barrier()
        begin = time.perf_counter()
        times = comm.allgather_object(time.time())
        length = max(comm.allgather_object(time.perf_counter() - begin))
        if length < shortest:
            shortest, best = length, [values - times[0] for values in times]
    assert best is not None
    return best
