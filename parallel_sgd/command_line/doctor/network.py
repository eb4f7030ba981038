"""How fast each pair of hosts exchanges, and how far their clocks are apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...communication import Communicator
from ...communication.messages import PIECE_BYTES

WARM_UP, SMALLEST, LARGEST = 1 << 19, 1 << 20, 1 << 25  #: bytes of a message
ENOUGH_S = 0.05  #: a message that takes so long says enough
ROUNDS, TRIES = 20, 3  #: of a message of a few bytes, and of one that is timed


@dataclass(frozen=True)
class Pair:
    """What two hosts have measured, while other pairs did the same.

    Attributes:
        hosts: their names.
        bytes_per_s: from the first to the second, and back.
        latency_s: of a message of a few bytes, one way.
    """

    hosts: tuple[str, str]
    bytes_per_s: tuple[float, float]
    latency_s: float


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Every two of so many, in rounds in each of which each has one partner at most.

    Example::

        >>> rounds_of_pairs(4)
        [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = list(range(count + count % 2))  # one that is not there makes an odd count even
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(p), max(p)) for p in pairs if max(p) < count])
        places[1:] = [places[-1], *places[1:-1]]
    return rounds


def measure_pairs(comm: Communicator, hosts: Sequence[str]) -> list[Pair]:
    """Every pair of hosts, by their first ranks; pairs of one round do not share a host.

    Args:
        hosts: of each rank.

    Collective; the same on all ranks. Cost: some tenths of a second for each host.
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
    """This rank's side of a measurement between two. Both call the same methods, one of them as
    the one that asks or sends.

    No wait is longer than the communicator's `timeout_s`.
    """

    def __init__(self, comm: Communicator, peer: int) -> None:
        self._messages, self._peer = comm.messages(), peer

    def latency_s(self, *, asks: bool) -> float:
        """Half of the quickest way there and back."""
        quickest = np.inf
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            self._ping(asks)
            quickest = min(quickest, time.perf_counter() - begin)
        return float(quickest / 2)

    def rate(self, *, sends: bool) -> float:
        """Bytes a second from the one that sends, the best of some; the same on both sides."""
        self._timed(WARM_UP, sends)  # what a link takes at once after a rest
        nbytes = SMALLEST
        while True:  # a rank that has no core for a moment makes a link look slow
            seconds = min(self._timed(nbytes, sends) for _ in range(TRIES))
            if seconds >= ENOUGH_S or nbytes >= LARGEST:
                return nbytes / max(seconds, 1e-9)
            nbytes *= 4

    def _timed(self, nbytes: int, sends: bool) -> float:
        """Seconds as the one that sends has measured them, until the other has all."""
        data = np.zeros(nbytes, np.uint8)
        begin = time.perf_counter()
        self._move(data, sends)
        self._move(np.zeros(1, np.uint8), not sends)
        seconds = np.array([time.perf_counter() - begin])
        self._move(seconds, sends)
        return float(seconds[0])

    def _ping(self, asks: bool) -> None:
        few = np.zeros(8, np.uint8)
        self._move(few, asks)
        self._move(few, not asks)

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
    """How far each rank's clock is ahead of the first's, in seconds, to within a barrier's length.

    Collective; the same on all ranks.
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
