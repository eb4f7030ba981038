"""Sums of all ranks' vectors: a compressed reduce-scatter and all-gather with error feedback.

Every rank owns a stripe of each bucket, adds up what all ranks have of it, in rank order (with a
`topology` within each host, and then by hosts), and sends the sum to all: a run repeats bit for bit
on the same ranks and hosts, on any MPI, by either transport. The order of an all-reduce is the MPI
library's affair; so is NCCL's, see `nccl`.

`layout` says who owns what, `reduction` what is done to it between messages, `residuals` what
messages have lost, and a `transport` when all of that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..communication import Communicator
from ..communication.mpi.nccl import Nccl
from ..compression import Codec, FullPrecision, require_float32
from ..kernels import finish_on_device, on_device
from ..parameters import Parameters
from ..state import Component
from .collective import Collective
from .layout import Bucket, CutBucket, Topology, cut_bucket
from .nccl import WithNccl
from .pipeline import Pipelined
from .reduction import CompressedReduction, PlainReduction, Reduction
from .residuals import Residuals
from .transport import IsReady, Transport
from .variable_length import VariableLengthReduction, share_step_sizes

Array = Any  #: a NumPy or CuPy array

TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "collective": Collective,
    "pipelined": Pipelined,
    "nccl": WithNccl,
}


class Exchange(Component):
    """Sums vectors of one layout over all ranks.

    Args:
        parameters: their layout.
        comm: the ranks.
        codecs: how the values of each bucket travel, or of all; None sends them as they are, and
            nothing is lost.
        buckets: of the vector, in the order in which their values will be ready; one if not given.
        transport: "collective" calls the MPI library's all-to-all and all-gather, one bucket after
            the other; "pipelined" sends pieces, so that kernels and wire overlap. The sums have the
            same bits. "nccl" lets NCCL sum over the ranks of each host, or all: see `nccl`.
        topology: which ranks add up among themselves before they send, in full precision; not with
            "collective". Every rank by itself if not given.
        error_feedback: False forgets what is lost: the residuals are zero after every sum.
        block_size: by which buckets without a codec are cut among the ranks; as the codecs' where
            `buckets` were made for it.
        overlapped: buckets are sent while others are still being computed: with an entropy code
            each has steps of its own, in place of one for all.
        nccl: for "nccl", over all ranks, or over those of this rank's host in `topology`.
    Raises:
        UserError: a lossy codec for parameters that are not float32.

    Creation is local. Memory for n values of b bits on K ranks: buffers of about 2n·b/8 bytes (at
    32 bits without a codec of 4n, and n more values with hosts; with an entropy code twice the room
    for its longest messages) beside the residuals of 4n + 4n/K. A sum sends 2·(K-1)/K·n·b/8 bytes
    (and the levels) per rank; it takes an encode of n values, K decodes of n/K, an encode of n/K,
    and a decode of n.
    """

    def __init__(
        self,
        parameters: Parameters,
        comm: Communicator,
        codecs: Codec | Sequence[Codec | None] | None = None,
        *,
        buckets: Sequence[Bucket] | None = None,
        transport: str = "collective",
        topology: Topology | None = None,
        error_feedback: bool = True,
        block_size: int = 256,
        overlapped: bool = False,
        nccl: Nccl | None = None,
    ) -> None:
        like = parameters.flat
        buckets = buckets or [Bucket(parameters.names, slice(0, like.size))]
        if codecs is None or isinstance(codecs, Codec):
            codecs = [codecs] * len(buckets)
        for codec in codecs:
            if codec is not None:
                require_float32(codec, parameters)

        cut_by = [codec or FullPrecision(block_size=block_size) for codec in codecs]
        blocks = {codec: codec.blocks(parameters) for codec in set(cut_by)}
        cuts: list[CutBucket] = []
        for number, (bucket, codec) in enumerate(zip(buckets, cut_by, strict=True)):
            tag = sum(len(cut.pieces) for cut in cuts)
            cuts.append(cut_bucket(number, bucket, blocks[codec], comm.size, tag))

        def reductions_over(topology: Topology) -> list[Reduction]:
            reductions: list[Reduction] = []
            for cut, codec in zip(cuts, codecs, strict=True):
                place = cut, like, comm.rank, topology
                if codec is None:
                    reductions.append(PlainReduction(*place))
                elif codec.has_fixed_length:
                    reductions.append(CompressedReduction(*place, codec))
                else:
                    reductions.append(VariableLengthReduction(*place, codec))
            self._step_sizes = share_step_sizes(reductions, by_bucket=overlapped)
            return reductions

        self.codecs, self.comm, self.error_feedback = tuple(codecs), comm, error_feedback
        options = {} if nccl is None else {"nccl": nccl}
        self._transport: Transport | None = TRANSPORTS[transport](
            reductions_over, topology or Topology.flat(comm.size), comm, **options
        )
        self._bytes_sent = 0
        self._quantized: tuple[slice, ...] | None = None

    def residuals(self, parameters: Parameters) -> Residuals:
        """Zeros, with which training starts. Local."""
        sizes = {name: stripe.stop - stripe.start for name, stripe in self.owned.items()}
        return Residuals.zeros(parameters.flat, sizes)

    @property
    def owned(self) -> dict[str, slice]:
        """Where this rank's stripes lie in the vector, by bucket as in `Residuals.owner_error`."""
        assert self._transport is not None
        return {reduction.name: reduction.own for reduction in self._transport.reductions}

    @property
    def bytes_sent(self) -> int:
        """By this rank to others, over all sums that have ended. Local."""
        return self._bytes_sent

    @property
    def quantized(self) -> tuple[slice, ...]:
        """Which values an entropy code quantizes. Local."""
        assert self._transport is not None
        if self._quantized is None:
            variable = [
                one
                for one in self._transport.reductions
                if isinstance(one, VariableLengthReduction)
            ]
            spans = sorted(span for one in variable for span in _places(one.quantized()))
            self._quantized = _joined(spans)
        return self._quantized

    def carry_over_bytes_sent(self, other: Exchange) -> None:
        """Count what another one has sent, whose place this one takes. Local."""
        self._bytes_sent = other.bytes_sent

    def close(self, *, failed: bool = False) -> None:
        """Let go of all buffers; what has been sent stays known. Local."""
        self._transport = None

    def sum(
        self, vector: Array, residuals: Residuals | None = None, is_ready: IsReady | None = None
    ) -> None:
        """Replace `vector` by (the decoded form of) its sum over all ranks.

        Args:
            vector: [n] of the parameters' dtype, finite; on return the same bits on all ranks.
            residuals: updated; None where nothing is lost.
            is_ready: whether the values of a bucket, by its number, are there; asked for one after
                the other, again and again. All are there if not given.

        Collective.
        """
        assert self._transport is not None
        for step_sizes in self._step_sizes:
            step_sizes.begin()
        with self.comm.trace.span("exchange"):
            self._bytes_sent += self._transport.sum(vector, residuals, is_ready)
            if residuals is not None:
                residuals.has_non_owned = False
                if not self.error_feedback:
                    residuals.reset()

    def sum_in_background(
        self, vector: Array, residuals: Residuals | None, is_ready: IsReady | None = None
    ) -> None:
        """`sum`, called in a worker thread: on the vector's GPU, and done there when it returns.

        Whoever starts the thread has first waited for what it does to the vector
        (`finish_on_device`).
        """
        with on_device(vector):
            self.sum(vector, residuals, is_ready)
            finish_on_device(vector)


def _places(slices: Sequence[slice]) -> list[tuple[int, int]]:
    return [(place.start, place.stop) for place in slices]


def _joined(places: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Ascending places, with neighbours as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in places:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return tuple(slice(begin, end) for begin, end in joined)
