"""The link and the kernels of the ranks at hand, and what the model makes of them."""

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
    """What says how many bits are fastest.

    Attributes:
        ranks: that exchange.
        ranks_per_host: that first add up among themselves; of uneven hosts the fewest, and then
            `ranks` are as many as there would be.
        link: of the slowest host.
        speeds: of the first rank's kernels, while all ranks ran theirs.
    """

    ranks: int
    ranks_per_host: int
    link: Link
    speeds: KernelSpeeds

    def best_bits(self, values: int) -> float:
        """For a bucket of so many float32. Local."""
        local = self.ranks_per_host
        return best_bits(values, self.ranks, self.link, self.speeds, ranks_per_host=local)

    def seconds(self, values: int, bits: float) -> float:
        """What an exchange of a bucket is predicted to take, in a pipeline. Local."""
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
        """As JSON can hold it, without what is no limit: rates in bytes and values a second."""
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
    """Measure links, and the kernels for arrays that are where `like` is (NumPy's if not given).

    Args:
        hosts: the ranks of each, which add up among themselves before they send.
        block_size: of the codecs.
        bits: whose codecs; all that are registered, if not given.

    Collective; the same on all ranks. Cost: some tenths of a second.
    """
    link = measure_link(comm, hosts)
    speeds = measure_kernel_speeds(block_size, bits, like)
    first = KernelSpeeds(**comm.allgather_object(vars(speeds))[0])  # ranks measure differently
    local = min(map(len, hosts))
    return Measured(local * len(hosts), local, link, first)
