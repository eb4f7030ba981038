"""The cost model of a push to a server and the following pull. No communication here.

K workers push a server's n values at b bits, v = b/8 + levels bytes per value, and pull 4 bytes per
value. All messages share the server's link, and the server's core decodes pushes one by one:

    startup = 2 (latency + K message)
    total   = startup + search(n) + n / encode + K (n v / rate + n / decode + 4 n / rate)

Workers encode in parallel. The server's optimizer is not included.
"""

from __future__ import annotations

from collections.abc import Collection

from .measured import Measured
from .model import LINK_EFFICIENCY, encoded_bytes, most_bits_within


def push_s(values: int, bits: float, workers: int, measured: Measured) -> float:
    """Return the seconds until the pushes of all workers are answered.

    Args:
        values: float32 values of the server with the most values.
        bits: of a registered codec with measured kernels.
        workers: number of workers.
        measured: link and kernel speeds.

    Local.
    """
    link, speeds = measured.link, measured.speeds
    startup_s = 2 * (link.latency_s + workers * link.message_s)
    wire_s = (encoded_bytes(values, bits) + 4 * values) / (LINK_EFFICIENCY * link.bytes_per_s)
    server_s = workers * (wire_s + values / speeds.decode[bits])
    worker_s = speeds.search_s(bits, values) + values / speeds.encode[bits]
    return startup_s + worker_s + server_s


def best_push_bits(
    values: int, workers: int, measured: Measured, allowed: Collection[float]
) -> float:
    """Return the most bits whose pushes take at most 5 % longer than the fastest.

    Args:
        values, workers, measured: see `push_s`.
        allowed: the possible bits.

    Local; pure.
    """
    return most_bits_within({bits: push_s(values, bits, workers, measured) for bits in allowed})
