"""Measured link and kernel speeds of the present ranks, and the model's predictions from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..communication import Communicator
from .kernel_speeds import Array, measure_kernel_speeds
from .links import measure_link
from .model import KernelSpeeds, Link, best_bits, exchange_s


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

    def best_bits(self, values: int) -> float:
        """Return the best bits for a bucket of `values` float32. Local."""
        local = self.ranks_per_host
        return best_bits(values, self.ranks, self.link, self.speeds, ranks_per_host=local)

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
        """Return a dictionary for JSON, with rates in bytes and values per second. Infinite rates
        are None (link) or absent (kernels).
        """
        kernels = {
            name: {str(bits): speed for bits, speed in by_bits.items() if speed < math.inf}
            for name, by_bits in vars(self.speeds).items()
        }
        rate = self.link.bytes_per_s
        link = {"latency_s": self.link.latency_s, "bytes_per_s": rate if rate < math.inf else None}
        return {"link": link, "values_per_s": kernels}


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
    first = KernelSpeeds(**comm.allgather_object(vars(speeds))[0])  # speeds differ by rank
    local = min(map(len, hosts))
    return Measured(local * len(hosts), local, link, first)
