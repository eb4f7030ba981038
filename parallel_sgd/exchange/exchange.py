"""Sum vectors over all ranks: a compressed reduce-scatter and all-gather with error feedback.

Every rank owns a stripe of each bucket. The owner adds the stripes of all ranks in rank order and
sends the sum to all ranks. With a hierarchical `topology`, the ranks of each host are added first,
then the hosts. A run therefore repeats bit for bit on the same ranks and hosts, with any MPI and
with both MPI transports. (MPI guarantees no order for an all-reduce, and neither does NCCL: see
`nccl`.)

`layout` assigns stripes to owners, `reduction` holds the arithmetic between messages, `residuals`
keeps the compression errors, and a `transport` schedules the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..communication import Communicator
from ..communication.cuda.nccl import Nccl
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
from .step_sizes import StepSizes
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
        parameters: the layout of the vectors.
        comm: the ranks.
        codecs: a codec for each bucket, or one for all buckets. None sends values unchanged,
            without loss.
        buckets: the buckets of the vector, in the order in which their values become ready.
            Default: a single bucket.
        transport: "collective" calls the MPI library's all-to-all and all-gather, one bucket after
            the other. "pipelined" sends pieces, so that kernels and messages overlap. Both give the
            same bits. "nccl" lets NCCL sum over the ranks of each host, or over all ranks: see
            `nccl`.
        topology: groups of ranks to add up in full precision before sending; not with "collective".
            Default: every rank sends for itself.
        residual_decay: factor of the residuals before every sum, from 0 to 1. 1 keeps all
            compression errors; 0 is no error feedback.
        block_size: the block size for cutting buckets without a codec into stripes. Equal to the
            codecs' block size if `buckets` were cut for that size.
        overlapped: True if buckets are sent while later buckets are still being computed. With an
            entropy code each bucket then has step sizes of its own, instead of one set for all
            buckets.
        nccl: the NCCL communicator for transport "nccl", over all ranks or over the ranks of this
            rank's host in `topology`.
    Raises:
        UserError: a codec is lossy and the parameters are not float32.

    Creation is local. Memory for n values of b bits on K ranks: buffers of about 2n·b/8 bytes, and
    residuals of 4n + 4n/K bytes. Without a codec (32 bits) the buffers take 4n bytes, and n more
    values with hosts. With an entropy code they take twice the room for its longest messages. Cost
    of a sum, per rank: 2·(K-1)/K·n·b/8 bytes sent (and the quantization levels), an encode of n
    values, K decodes of n/K, an encode of n/K, and a decode of n.
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
        residual_decay: float = 1.0,
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

        def reductions_over(part: int, topology: Topology) -> list[Reduction]:
            reductions: list[Reduction] = []
            for bucket, cut, codec in zip(buckets, cuts, codecs, strict=True):
                if bucket.part != part:
                    continue
                place = cut, like, comm.rank, topology
                if codec is None:
                    reductions.append(PlainReduction(*place))
                elif codec.has_fixed_length:
                    reductions.append(CompressedReduction(*place, codec))
                else:
                    reductions.append(VariableLengthReduction(*place, codec))
            self._step_sizes.append(share_step_sizes(reductions, by_bucket=overlapped))
            return reductions

        self.codecs, self.comm, self._residual_decay = tuple(codecs), comm, residual_decay
        self._step_sizes: list[list[StepSizes]] = []  # by part
        options = {} if nccl is None else {"nccl": nccl}
        topology = topology or Topology.flat(comm.size)
        self._transports: list[Transport] = [
            TRANSPORTS[transport](partial(reductions_over, part), topology, comm, **options)
            for part in sorted({bucket.part for bucket in buckets})
        ]
        self._not_summed = {*range(len(self._transports))}  # parts without a sum so far
        self._bytes_sent = 0
        self._quantized: tuple[slice, ...] | None = None

    def residuals(self, parameters: Parameters) -> Residuals:
        """Return zero residuals to start training with. Local."""
        sizes = {name: stripe.stop - stripe.start for name, stripe in self.owned.items()}
        return Residuals.zeros(parameters.flat, sizes)

    @property
    def _reductions(self) -> list[Reduction]:
        """The reductions of all buckets, in the order of buckets."""
        assert self._transports, "closed"
        reductions = [
            reduction for transport in self._transports for reduction in transport.reductions
        ]
        return sorted(reductions, key=lambda reduction: int(reduction.name))

    @property
    def owned(self) -> dict[str, slice]:
        """This rank's stripe in the vector, by bucket name as in `Residuals.owner_error`."""
        return {reduction.name: reduction.own for reduction in self._reductions}

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank to other ranks, over all completed sums. Local."""
        return self._bytes_sent

    @property
    def quantized(self) -> tuple[slice, ...]:
        """The slices of the vector quantized by an entropy code. Local."""
        if self._quantized is None:
            variable = [
                reduction
                for reduction in self._reductions
                if isinstance(reduction, VariableLengthReduction)
            ]
            spans = sorted(
                span for reduction in variable for span in _places(reduction.quantized())
            )
            self._quantized = _joined(spans)
        return self._quantized

    def carry_over_bytes_sent(self, other: Exchange) -> None:
        """Carry over the byte counter of the exchange that this exchange replaces. Local."""
        self._bytes_sent = other.bytes_sent

    def close(self, *, failed: bool = False) -> None:
        """Release all buffers. `bytes_sent` stays available. Local."""
        self._transports = []

    def sum(
        self,
        vector: Array,
        residuals: Residuals | None = None,
        is_ready: IsReady | None = None,
        part: int = 0,
    ) -> None:
        """Replace a part of `vector` by its (decoded) sum over all ranks.

        Args:
            vector: [n] of the parameters' dtype, finite; on return the part has the same bits on
                all ranks.
            residuals: those of the part are updated; None if nothing is lost.
            is_ready: returns True once the values of a bucket, given by number in the part, are
                complete. Polled bucket by bucket. Default: all buckets are ready.
            part: see `Bucket`.

        Collective.
        """
        transport = self._transports[part]
        if residuals is not None:
            reductions = transport.reductions
            begin = min(reduction.values.start for reduction in reductions)
            end = max(reduction.values.stop for reduction in reductions)
            names = [reduction.name for reduction in reductions]
            residuals.decay(self._residual_decay, slice(begin, end), names)
        for step_sizes in self._step_sizes[part]:
            step_sizes.begin()
        with self.comm.trace.span("exchange"):
            self._bytes_sent += transport.sum(vector, residuals, is_ready)
            self._not_summed.discard(part)
            if residuals is not None and not self._not_summed:
                residuals.has_non_owned = False

    def sum_in_background(
        self,
        vector: Array,
        residuals: Residuals | None,
        is_ready: IsReady | None = None,
        part: int = 0,
    ) -> None:
        """Call `sum` from a worker thread on the vector's GPU, and wait for the GPU.

        The caller must first wait for its own GPU work on the vector (`finish_on_device`).
        Collective.
        """
        with on_device(vector):
            self.sum(vector, residuals, is_ready, part)
            finish_on_device(vector)


def _places(slices: Sequence[slice]) -> list[tuple[int, int]]:
    return [(place.start, place.stop) for place in slices]


def _joined(places: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Merge adjacent intervals of an ascending sequence."""
    joined: list[tuple[int, int]] = []
    for begin, end in places:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return tuple(slice(begin, end) for begin, end in joined)
