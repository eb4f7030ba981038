"""The cost model of an exchange, in pure functions. No communication here.

Let n values at b bits, v = b/8 + levels bytes per value, be summed over H hosts of L ranks each. A
host sends (and receives at the same time) on its only link

    bytes = 2 (H-1)/H n v

and a rank's core encodes, adds the received values as an owner, encodes the sum, and decodes all:

    kernels = n/L (1 + 1/H) / encode + n/L / decode_add + n / decode

If L > 1, the ranks of a host first sum in full precision through shared memory, each rank a part of
n/L values, at an additional (2 L-1)/L n / decode_add(32 bits). A stripe of n/ranks values travels
in P pieces (`exchange/layout.py`), each of them a message. Messages to H-1 hosts share their
latencies, but not their overheads:

    startup = 2 (latency + (H-1) P message)

While a piece is on the wire, the core works on the remaining pieces, so the total is

    total = startup + max(wire, kernels) + min(ends, wire / P)

The last term of the total is the time at the ends, without overlap: `ends` is 1/P of the owners'
kernels, since all ranks must have sent by then, and 1/(H P) of the remaining kernels. The MPI
library's collectives do not overlap, and P is the number of buckets. Core time for messages, and
with TCP for bytes, is not available to kernels.

With an entropy code a rank also finds two step sizes, one for its own messages and one for the sums
that it owns. A search takes a fixed time, and a time for each value of a sample. Nothing is sent
meanwhile:

    total += search(n/L) + search(n/ranks)

docs/planning.md lists the omitted terms and the deviation from measurements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..communication.messages import piece_values
from ..compression import (
    CODE,
    EntropyCoded,
    auto_bits,
    checked_bits,
    codec_for,
    sampled_values,
)
from ..errors import UserError
from ..validation import integer, number

TOLERANCE = 1.05  #: a choice may take this many times as long as the fastest
LINK_EFFICIENCY = 0.92  #: fraction of a link's rate in a pipelined exchange: docs/planning.md
TCP_PAYLOAD = 1448 / 1514  #: payload as a fraction of a full Ethernet frame


@dataclass(frozen=True)
class Link:
    """A host's link to all hosts; each direction has the whole rate, at the same time.

    Attributes:
        latency_s: seconds one way, for a message of a few bytes.
        bytes_per_s: payload; infinity for no limit.
        core_s_per_byte: core seconds to send a byte and to receive a byte: a cost of TCP, not of
            RDMA.
        message_s: core seconds to send a message and to receive a message; default: mpi4py over
            TCP.
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
        """Return a link of this rate, less the overhead of TCP and Ethernet on full frames.

        Args:
            bits_per_s: of the link.
            latency_s: seconds one way.
        """
        return Link(latency_s, bits_per_s / 8 * TCP_PAYLOAD)


@dataclass(frozen=True)
class StepSearch:
    """The time in which an entropy code's step size is found (`compression/step_search.py`).

    Attributes:
        fixed_s: seconds for any vector.
        value_s: seconds for each value of its sample.
    """

    fixed_s: float
    value_s: float

    def seconds(self, values: float) -> float:
        """Return the seconds for a vector of `values` values. Local."""
        return self.fixed_s + self.value_s * sampled_values(int(values))


@dataclass(frozen=True)
class KernelSpeeds:
    """Values per second of a rank on one core, by bits: see `measure_kernel_speeds`.

    Attributes:
        encode: with error feedback; infinity at 32 bits, since no encoding is needed.
        decode: infinity at 32 bits, likewise.
        decode_add: decoding and adding of received values by an owner; at 32 bits a plain sum.
        searches: seconds of the entropy codes' searches for a step size.
    """

    encode: Mapping[float, float]
    decode: Mapping[float, float]
    decode_add: Mapping[float, float]
    searches: Mapping[float, StepSearch] = field(default_factory=dict)

    def at(self, bits: float) -> tuple[float, float, float]:
        """Return the speeds of encoding, decoding and adding, for the nearest measured number of
        bits.
        """
        nearest = _nearest(self.encode, bits)
        return self.encode[nearest], self.decode[nearest], self.decode_add[nearest]

    def search_s(self, bits: float, values: float) -> float:
        """Return the seconds to find the step size for a vector, 0 for a code without. Local."""
        if not self.searches or not isinstance(codec_for(bits), EntropyCoded):
            return 0.0
        return self.searches[_nearest(self.searches, bits)].seconds(values)

    @property
    def values_per_s(self) -> dict[str, Mapping[float, float]]:
        """The speeds by name."""
        return {"encode": self.encode, "decode": self.decode, "decode_add": self.decode_add}

    def searches_as_dict(self) -> dict[str, dict[str, float]]:
        """Return the searches by bits, for JSON."""
        return {str(bits): asdict(search) for bits, search in self.searches.items()}

    def times(self, factor: float) -> KernelSpeeds:
        """Return the speeds of kernels that are `factor` times as fast. Local."""
        encode, decode, decode_add = (
            {bits: factor * speed for bits, speed in speeds.items()}
            for speeds in self.values_per_s.values()
        )
        searches = {
            bits: StepSearch(search.fixed_s / factor, search.value_s / factor)
            for bits, search in self.searches.items()
        }
        return KernelSpeeds(encode, decode, decode_add, searches)


def _nearest(measured: Iterable[float], bits: float) -> float:
    """Return the nearest number of bits, by ratio."""
    return min(measured, key=lambda one: abs(math.log(one / bits)))


@dataclass(frozen=True)
class ExchangeCost:
    """Seconds of an exchange.

    Attributes:
        wire_s: of the host's link.
        kernels_s: of a rank's core.
        startup_s: latencies and messages.
        total_s: less than the sum of the terms, due to the overlap of wire and kernels.
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
    searches: float = 1,
    cores_per_rank: float = 1.0,
) -> ExchangeCost:
    """Predict the seconds of a sum over all ranks.

    Args:
        values: float32 values of the vector; at least 1.
        bits: of a registered codec.
        ranks: number of ranks, a multiple of `ranks_per_host`.
        link: of every host.
        speeds: of every rank, with a core of its own.
        ranks_per_host: number of ranks sharing a link and memory.
        pipelined: whether wire and kernels overlap by pieces.
        buckets: of the vector, each with its own pieces, or its own collectives.
        searches: parts of the vector with step sizes of their own: all buckets together have one,
            but those sent during backward have one each. A fraction if the vector is a part of
            those with the same step. Nothing is sent during the first search.
        cores_per_rank: less than 1 for ranks sharing cores: kernels then take longer.

    Raises:
        UserError: the ranks do not fill whole hosts, or the bits are unknown.

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
    kernels = _kernels_s(values, bits, hosts, local, speeds, searches)
    owners_s, rest_s, search_s = (s * slower for s in kernels)
    first_s = min(searches, 1) * search_s
    rest_s += searches * search_s - first_s
    kernels_s = owners_s + rest_s
    pieces, rounds = buckets, 2 * buckets  # rounds: exposed latencies
    if pipelined:
        stripe = values / (buckets * ranks)  # pieces: see `exchange/layout.py`
        pieces, rounds = buckets * max(math.ceil(stripe / piece_values(bits / 8)), 1), 2
    messages_s = 2 * (hosts - 1) * pieces * link.message_s * slower
    latencies_s = rounds * link.latency_s if hosts > 1 else 0.0
    if pipelined:
        busiest_s = max(link_s, sending_s + kernels_s + messages_s)
        total_s = busiest_s + min((owners_s + rest_s / hosts) / pieces, link_s / pieces)
    else:
        total_s = wire_s + kernels_s + messages_s
    total_s += first_s + latencies_s
    return ExchangeCost(wire_s, kernels_s + first_s, latencies_s + messages_s, total_s)


def encoded_bytes(values: int, bits: float, block_size: int = 1024, *, code: str = CODE) -> float:
    """Return the encoded bytes of `values` float32 in full blocks. The last block of a parameter
    may add some bytes.
    """
    return codec_for(bits, code=code, block_size=block_size).encoded_bytes(values)


def bytes_sent(
    values: int, bits: float, ranks: int, block_size: int = 1024, *, code: str = CODE
) -> float:
    """Return the average bytes sent by a rank in an exchange of `values` float32.

    Collectives send vectors of up to 32 KiB whole at 32 bits; not included here.
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
    searches: float = 1,
) -> float:
    """Return the most bits whose exchange takes at most 5 % longer than the fastest.

    Args:
        values: float32 values of the vector.
        ranks, link, speeds, ranks_per_host, searches: see `exchange_s`.
        allowed: the possible bits; default: all bits with known `speeds` that learn like 32 bits
            (`auto_bits`).

    On an unlimited link no precision is lost without gain. Local; a pure function, so equal
    arguments give equal choices on all ranks.
    """
    how: dict[str, Any] = {"ranks_per_host": ranks_per_host, "searches": searches}
    seconds = {
        bits: exchange_s(values, bits, ranks, link, speeds, **how).total_s
        for bits in allowed or speeds.encode.keys() & {*auto_bits()}
    }
    return most_bits_within(seconds)


def most_bits_within(seconds: Mapping[float, float]) -> float:
    """Return the most bits with at most `TOLERANCE` times the fastest seconds. Local."""
    limit = TOLERANCE * min(seconds.values())
    return max(bits for bits, total_s in seconds.items() if total_s <= limit)


def _kernels_s(
    values: int, bits: float, hosts: int, local: int, speeds: KernelSpeeds, searches: float
) -> tuple[float, float, float]:
    """Return the core seconds of the owners' kernels, of the rest, and of each pair of searches,
    for a core per rank."""
    if hosts == 1:  # ranks exchange directly, through shared memory
        hosts, local, copied = local, 1, bytes_sent(values, bits, local) / 4
    else:  # copies to shared memory, then each rank sums a part
        copied = values * (2 * local - 1) / local if local > 1 else 0.0
    own, (encode, decode, decode_add) = values / local, speeds.at(bits)
    owners_s = own / decode_add + own / hosts / encode
    rest_s = own / encode + values / decode
    search_s = sum(speeds.search_s(bits, part / searches) for part in (own, own / hosts))
    return owners_s, rest_s + copied / speeds.decode_add[32], search_s
