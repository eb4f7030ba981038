"""Measured link and kernel speeds of the present ranks, and the model's predictions from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import runtime
from ..communication import Communicator
from ..communication.messages import PIECE_BYTES
from .kernel_speeds import Array, measure_kernel_speeds
from .model import KernelSpeeds, Link, StepSearch, best_bits, exchange_s

SMALL, LARGEST = 1 << 18, 1 << 25  #: bytes of a message; SMALL exceeds a link's burst capacity
LONG_ENOUGH_S = 0.05  #: duration of a message for an accurate rate
ROUNDS = 20  #: repetitions of the 8-byte message


@dataclass(frozen=True)
class Measured:
    """The measurements behind a choice of bits.

    Attributes:
        ranks: number of ranks in the exchange.
        ranks_per_host: ranks of a host, which first sum among themselves. For uneven hosts the
            smallest number, and `ranks` is then that number times the number of hosts.
        link: of the slowest host.
        speeds: of the first rank's kernels, while all ranks ran their kernels.
    """

    ranks: int
    ranks_per_host: int
    link: Link
    speeds: KernelSpeeds

    def best_bits(self, values: int, searches: float = 1) -> float:
        """Return the best bits for a bucket of `values` float32. Local.

        Args:
            searches: see `exchange_s`.
        """
        how: dict[str, Any] = {"ranks_per_host": self.ranks_per_host, "searches": searches}
        return best_bits(values, self.ranks, self.link, self.speeds, **how)

    def seconds(self, values: int, bits: float) -> float:
        """Return the predicted seconds of a pipelined exchange of a bucket. Local."""
        local = self.ranks_per_host
        cost = exchange_s(values, bits, self.ranks, self.link, self.speeds, ranks_per_host=local)
        return cost.total_s

    def __str__(self) -> str:
        link, speeds = self.link, self.speeds
        kernels = [
            f"{bits} bit {speeds.encode[bits] / 1e9:.2g}, {speeds.decode[bits] / 1e9:.2g}"
            for bits in sorted(speeds.encode)
            if bits < 32
        ]
        return (
            f"links of {link.bytes_per_s / 1e6:,.4g} MB/s and {link.latency_s * 1e6:,.3g} us; "
            f"encode and decode, G values/s: {'; '.join(kernels)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, with rates in bytes and values per second, and the seconds
        of searches for a step size. Infinite rates are None (link) or absent (kernels).
        """
        kernels = {
            name: {str(bits): speed for bits, speed in by_bits.items() if speed < math.inf}
            for name, by_bits in self.speeds.values_per_s.items()
        }
        rate = self.link.bytes_per_s
        link = {"latency_s": self.link.latency_s, "bytes_per_s": rate if rate < math.inf else None}
        searches = self.speeds.searches_as_dict()
        return {"link": link, "values_per_s": kernels, "step_search_s": searches}


def measure(
    comm: Communicator,
    hosts: Sequence[Sequence[int]],
    block_size: int = 1024,
    like: Array | None = None,
    bits: Collection[float] = (),
) -> Measured:
    """Measure the links and the kernels.

    Args:
        comm: the ranks.
        hosts: the ranks of each host, which sum among themselves before sending.
        block_size: of the codecs.
        like: an array on the device of the exchange's vectors; default NumPy.
        bits: of the codecs to measure; default: all registered.

    Collective; the same on all ranks. Cost: some tenths of a second.
    """
    link = measure_link(comm, hosts)
    speeds = measure_kernel_speeds(block_size, bits, like)
    fields = comm.allgather_object(asdict(speeds))[0]  # speeds differ by rank
    searches = {bits: StepSearch(**search) for bits, search in fields.pop("searches").items()}
    first = KernelSpeeds(**fields, searches=searches)
    local = min(map(len, hosts))
    return Measured(local * len(hosts), local, link, first)


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
    begin = runtime.perf_counter()
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
    slowest: float = max(comm.allgather_object(runtime.perf_counter() - begin))
    return slowest
