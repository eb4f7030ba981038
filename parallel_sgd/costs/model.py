"""What one exchange should take: the stated cost model, in pure functions. No communication here.

Of n values at b bits on H hosts of L ranks each, with v = b/8 + levels bytes a value, a host sends
(and receives at the same time) on its one link

    bytes = 2 (H-1)/H n v

and a rank's core encodes, adds what it gets as an owner, encodes the sum, and decodes all:

    kernels = n/L (1 + 1/H) / encode + n/L / decode_add + n / decode

Where L > 1, the ranks of a host first add up in full precision through memory that they share, each
a part of n/L values: (2 L-1)/L n / decode_add(32 bits) more. A stripe of n/ranks values travels in
P pieces (`exchange/layout.py`), each of them a message. Messages to H-1 hosts share their
latencies, but not their overheads:

    startup = 2 (latency + (H-1) P message)

While a piece is on the wire the core works on others, so that all of it takes

    total = startup + max(wire, kernels) + min(ends, wire / P)

where the last term is when there is but one of them to do: `ends` is 1/P of what owners do, as all
ranks must have sent by then, and 1/(H P) of the other kernels. With the MPI library's collectives
nothing overlaps, and P is the number of buckets. What a core spends on messages, and with TCP on
bytes, it cannot spend on kernels. docs/planning.md says what is left out, and how far from
measurements it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..communication.messages import piece_values
from ..compression import CODE, auto_bits, checked_bits, codec_for
from ..errors import UserError
from ..validation import integer, number

TOLERANCE = 1.05  #: a choice may take this many times as long as the fastest
LINK_EFFICIENCY = 0.92  #: fraction of a link's rate in a pipelined exchange: docs/planning.md
TCP_PAYLOAD = 1448 / 1514  #: payload as a fraction of a full Ethernet frame


@dataclass(frozen=True)
class Link:
    """One host's link to all others; each direction has the whole rate, at once.

    Attributes:
        latency_s: seconds one way, of a message of a few bytes.
        bytes_per_s: payload; infinity where it is no limit.
        core_s_per_byte: of a core, to send a byte and to receive one: what TCP costs, RDMA not.
        message_s: of a core, to send a message and to receive one; as mpi4py takes over TCP.
    """

    latency_s: float
    bytes_per_s: float
    core_s_per_byte: float = 0.0
    message_s: float = 2e-5

    def __post_init__(self) -> None:
        number("latency_s", self.latency_s, 0)
        if not self.bytes_per_s > 0:
            raise UserError(f"bytes_per_s={self.bytes_per_s} of a link must be more than 0")

    @staticmethod
    def ethernet(bits_per_s: float, latency_s: float) -> Link:
        """A link of this rate, less what TCP and Ethernet add to the payload of full frames."""
        return Link(latency_s, bits_per_s / 8 * TCP_PAYLOAD)


@dataclass(frozen=True)
class KernelSpeeds:
    """Values a second of one rank on one core, by bits: see `measure_kernel_speeds`.

    Attributes:
        encode: with error feedback; infinity at 32 bits, which are sent from where they are.
        decode: infinity at 32 bits, likewise.
        decode_add: as an owner adds what it has received; at 32 bits a plain sum.
    """

    encode: Mapping[float, float]
    decode: Mapping[float, float]
    decode_add: Mapping[float, float]

    def at(self, bits: float) -> tuple[float, float, float]:
        """Of encoding, decoding and adding, with the measured number of bits that is nearest."""
        nearest = min(self.encode, key=lambda measured: abs(math.log(measured / bits)))
        return self.encode[nearest], self.decode[nearest], self.decode_add[nearest]

    def times(self, factor: float) -> KernelSpeeds:
        """The same kernels, so many times as fast. Local."""
        return KernelSpeeds(
            *(
                {bits: factor * speed for bits, speed in speeds.items()}
                for speeds in (self.encode, self.decode, self.decode_add)
            )
        )


@dataclass(frozen=True)
class ExchangeCost:
    """Seconds of one exchange.

    Attributes:
        wire_s: on the host's link.
        kernels_s: of a rank's core.
        startup_s: latencies and messages.
        total_s: less than their sum, as far as wire and kernels overlap.
    """

    wire_s: float
    kernels_s: float
    startup_s: float
    total_s: float


def exchange_s(
    values: int,
    bits: float,
    ranks: int,
    link: Link,
    speeds: KernelSpeeds,
    *,
    ranks_per_host: int = 1,
    pipelined: bool = True,
    buckets: int = 1,
    cores_per_rank: float = 1.0,
) -> ExchangeCost:
    """What a sum over all ranks should take.

    Args:
        values: of float32, in the vector; at least 1.
        bits: for which a codec is registered.
        ranks: how many, a multiple of `ranks_per_host`.
        link: of every host.
        speeds: of every rank, which has a core of its own.
        ranks_per_host: that share a link and memory.
        pipelined: whether wire and kernels overlap by pieces.
        buckets: of the vector, each cut into pieces of its own, or summed by its own collectives.
        cores_per_rank: less than 1 where ranks share cores: kernels then take longer.

    Raises:
        UserError: the ranks do not fill whole hosts, or the bits are not known.

    Local.
    """
    bits = checked_bits("bits", bits)
    ranks = integer("ranks", ranks, 1)
    local = integer("ranks_per_host", ranks_per_host, 1)
    if ranks % local:
        raise UserError(f"ranks={ranks} must be a multiple of ranks_per_host={local}")
    hosts, slower = ranks // local, 1 / min(1.0, cores_per_rank)
    sent = bytes_sent(values, bits, hosts)
    link_s = sent / (LINK_EFFICIENCY * link.bytes_per_s)
    sending_s = sent / local * link.core_s_per_byte * slower
    wire_s = max(link_s, sending_s)
    owners_s, rest_s = (s * slower for s in _kernels_s(values, bits, hosts, local, speeds))
    kernels_s = owners_s + rest_s
    pieces, rounds = buckets, 2 * buckets  # rounds of latency that no other message hides
    if pipelined:
        stripe = values / (buckets * ranks)  # is cut as `exchange/layout.py` does
        pieces, rounds = buckets * max(math.ceil(stripe / piece_values(bits / 8)), 1), 2
    messages_s = 2 * (hosts - 1) * pieces * link.message_s * slower
    latencies_s = rounds * link.latency_s if hosts > 1 else 0.0
    if pipelined:
        busiest_s = max(link_s, sending_s + kernels_s + messages_s)
        total_s = busiest_s + min((owners_s + rest_s / hosts) / pieces, link_s / pieces)
    else:
        total_s = wire_s + kernels_s + messages_s
    return ExchangeCost(wire_s, kernels_s, latencies_s + messages_s, latencies_s + total_s)


def encoded_bytes(values: int, bits: float, block_size: int = 1024, *, code: str = CODE) -> float:
    """Of so many float32 in full blocks; the last block of a parameter may add some bytes."""
    return codec_for(bits, code=code, block_size=block_size).encoded_bytes(values)


def bytes_sent(
    values: int, bits: float, ranks: int, block_size: int = 1024, *, code: str = CODE
) -> float:
    """The bytes that a rank sends to others in an exchange of `values` float32, on average.

    Vectors of up to 32 KiB are sent whole at 32 bits, where collectives are used; this is not
    counted here.
    """
    return 2 * (ranks - 1) / ranks * encoded_bytes(values, bits, block_size, code=code)


def best_bits(
    values: int,
    ranks: int,
    link: Link,
    speeds: KernelSpeeds,
    allowed: Collection[float] = (),
    *,
    ranks_per_host: int = 1,
) -> float:
    """The bits whose exchange takes the fewest seconds; of those within 5 %, the most.

    Args:
        allowed: what they may be; if not given, all whose `speeds` are known and that learn as 32
            do (`auto_bits`).

    So where the link is no limit, nobody loses precision for nothing. Local; pure, so that all
    ranks choose alike from alike arguments.
    """
    seconds = {
        bits: exchange_s(values, bits, ranks, link, speeds, ranks_per_host=ranks_per_host).total_s
        for bits in allowed or speeds.encode.keys() & {*auto_bits()}
    }
    return most_bits_within(seconds)


def most_bits_within(seconds: Mapping[float, float]) -> float:
    """The most bits that take at most `TOLERANCE` times as long as the fastest. Local."""
    limit = TOLERANCE * min(seconds.values())
    return max(bits for bits, total_s in seconds.items() if total_s <= limit)


def _kernels_s(
    values: int, bits: float, hosts: int, local: int, speeds: KernelSpeeds
) -> tuple[float, float]:
    """Seconds of a core that a rank has to itself: what owners do, and the rest."""
    if hosts == 1:  # its ranks exchange among themselves, through memory
        hosts, local, copied = local, 1, bytes_sent(values, bits, local) / 4
    else:  # into memory that is shared, then the sum of a part over the ranks
        copied = values * (2 * local - 1) / local if local > 1 else 0.0
    own, (encode, decode, decode_add) = values / local, speeds.at(bits)
    owners_s = own / decode_add + own / hosts / encode
    rest_s = own / encode + values / decode
    return owners_s, rest_s + copied / speeds.decode_add[32]
