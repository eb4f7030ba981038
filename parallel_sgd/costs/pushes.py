"""What a push to a server and the pull after it should take. No communication here.

Of a server's n values K workers push b bits each, with v = b/8 + levels bytes a value, and pull 4
bytes each. All go over the server's one link, and its core decodes one push after the other:

    startup = 2 (latency + K message)
    total   = startup + n / encode + K (n v / rate + n / decode + 4 n / rate)

Every worker encodes for itself. What the server's optimizer takes is left out.
"""

from __future__ import annotations

from collections.abc import Collection

from .measured import Measured
from .model import LINK_EFFICIENCY, encoded_bytes, most_bits_within


def push_s(values: int, bits: float, workers: int, measured: Measured) -> float:
    """Seconds until the pushes of all workers are answered.

    Args:
        values: float32, of the server that has most.
        bits: for which a codec is registered, and whose kernels were measured.

    Local.
    """
    link, speeds = measured.link, measured.speeds
    startup_s = 2 * (link.latency_s + workers * link.message_s)
    wire_s = (encoded_bytes(values, bits) + 4 * values) / (LINK_EFFICIENCY * link.bytes_per_s)
    server_s = workers * (wire_s + values / speeds.decode[bits])
    return startup_s + values / speeds.encode[bits] + server_s


def best_push_bits(
    values: int, workers: int, measured: Measured, allowed: Collection[float]
) -> float:
    """The bits of pushes that are answered soonest; of those within 5 %, the most.

    Args:
        allowed: what they may be.

    Local; pure.
    """
    return most_bits_within({bits: push_s(values, bits, workers, measured) for bits in allowed})
