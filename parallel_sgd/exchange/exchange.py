"""Sums of all ranks' vectors, the same bits on all: by buckets, with a codec for each.

Every rank owns a stripe of each bucket, adds up what all ranks have of it, in rank order (with
`routes` within each host, and then by hosts), and sends the sum to all: a run repeats bit for bit
on the same ranks and hosts, on any MPI, by either transport. The order of an all-reduce is the MPI
library's affair; so is NCCL's, see `nccl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..communication import Communicator
from ..compression import Codec, FullPrecision
from ..errors import UserError
from ..kernels import empty_like, finish_on_device, on_device
from ..parameters import Parameters
from .collective import Collectives
from .nccl import Nccl, NcclExchange, PlaceRoutes
from .pieces import Bucket, blocks_of
from .pipeline import Pipeline
from .residuals import Residuals
from .routes import Routes
from .stages import CompressedStages, Part, PlainStages, Stages

Array = Any  #: a NumPy or CuPy array

TRANSPORTS = ("collective", "pipelined", "nccl")

NAP_S = 5e-4  #: between two looks at whether values are ready


class Exchange:
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
        routes: which ranks add up among themselves before they send, in full precision; not with
            "collective". Every rank by itself if not given.
        error_feedback: False forgets what is lost: the residuals are zero after every sum.
        block_size: by which buckets without a codec are cut among the ranks; as the codecs' where
            `buckets` were made for it.
        nccl: for "nccl", over all ranks, or over those of this rank's host in `routes`.
    Raises:
        UserError: a lossy codec for parameters that are not float32.

    Attributes:
        bytes_sent: by this rank to others, over all exchanges so far.
        send_stray_residuals: whether the next sum also sends what the first residual holds of
            values that another rank of the host gathers: after it has come from a checkpoint of
            other ranks or routes.

    Creation is local. Memory for n values of b bits on K ranks: buffers of about 2n·b/8 bytes (at
    32 bits without a codec of 4n, and n more values with `routes`) beside the residuals of
    4n + 4n/K. A sum sends 2·(K-1)/K·n·b/8 bytes (and the levels) per rank; it takes an encode of n
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
        routes: Routes | None = None,
        error_feedback: bool = True,
        block_size: int = 256,
        nccl: Nccl | None = None,
    ) -> None:
        assert transport in TRANSPORTS and (transport == "nccl") == (nccl is not None)
        like, routes = parameters.flat, routes or Routes.flat(comm.size)
        assert transport != "collective" or not routes.hierarchical
        buckets = buckets or [Bucket(parameters.names, slice(0, like.size))]
        if codecs is None or isinstance(codecs, Codec):
            codecs = [codecs] * len(buckets)
        self.codecs, self.routes, self.error_feedback = tuple(codecs), routes, error_feedback
        self.transport, self.comm = transport, comm
        seen = routes if nccl is None else PlaceRoutes.of(nccl.groups(routes), comm.rank)
        self._stages: list[Stages] = []
        tag = 0
        for number, (bucket, codec) in enumerate(zip(buckets, codecs, strict=True)):
            if codec is not None:
                require_float32(codec, parameters)
            cut_by = codec or FullPrecision(block_size=block_size)
            blocks = blocks_of(cut_by.blocks(parameters), bucket)
            part = Part(number, bucket, blocks, like, comm.rank, seen, tag)
            self._stages.append(
                PlainStages(part) if codec is None else CompressedStages(part, codec)
            )
            tag += len(self._stages[-1].pieces)
        self._pipeline: Pipeline | NcclExchange | None = None
        if transport == "pipelined":
            self._pipeline = Pipeline(self._stages, routes, comm)
        elif nccl is not None:
            self._pipeline = NcclExchange(self._stages, routes, comm, nccl)
        self._collectives = [
            Collectives(stages, like, comm) for stages in self._stages if self._pipeline is None
        ]
        self.send_stray_residuals = False
        self._sent_before = 0

    @property
    def bytes_sent(self) -> int:
        each = [self._pipeline] if self._pipeline else self._collectives
        return self._sent_before + sum(one.bytes_sent for one in each)

    @bytes_sent.setter
    def bytes_sent(self, sent: int) -> None:
        self._sent_before += sent - self.bytes_sent

    def residuals(self, parameters: Parameters) -> Residuals:
        """Zeros, with which training starts. Local."""

        def zeros(size: int) -> Array:
            vector = empty_like(parameters.flat, size)
            vector.fill(0)
            return vector

        total = {stages.name: zeros(stages.own.stop - stages.own.start) for stages in self._stages}
        return Residuals(zeros(parameters.flat.size), total)

    def close(self) -> None:
        """Let go of all buffers; what has been sent stays known. Local."""
        self._sent_before = self.bytes_sent
        self._pipeline = None
        self._collectives, self._stages = [], []

    def sum(
        self,
        vector: Array,
        residuals: Residuals | None = None,
        is_ready: Callable[[int], bool] | None = None,
    ) -> None:
        """Replace `vector` by (the decoded form of) its sum over all ranks.

        Args:
            vector: [n] of the parameters' dtype, finite; on return the same bits on all ranks.
            residuals: updated; None where nothing is lost.
            is_ready: whether the values of a bucket, by its number, are there; asked for one after
                the other, again and again. All are there if not given.

        Collective.
        """
        with self.comm.trace.span("exchange"):
            if self._pipeline:
                stray, self.send_stray_residuals = self.send_stray_residuals, False
                self._pipeline.sum(vector, residuals, is_ready, stray=stray)
            for number, bucket in enumerate(self._collectives):
                while is_ready is not None and not is_ready(number):
                    time.sleep(NAP_S)
                bucket.sum(vector, residuals)
            if residuals is not None and not self.error_feedback:
                residuals.own.fill(0)
                for total in residuals.total.values():
                    total.fill(0)

    def sum_aside(
        self,
        vector: Array,
        residuals: Residuals | None,
        is_ready: Callable[[int], bool] | None = None,
    ) -> None:
        """`sum` in a thread of its own: on the vector's GPU, and done there when it returns.

        Whoever starts it has first waited for what it does to the vector (`finish_on_device`).
        """
        with on_device(vector):
            self.sum(vector, residuals, is_ready)
            finish_on_device(vector)


def require_float32(codec: Codec, parameters: Parameters) -> None:
    """Refuse a lossy codec for parameters of another dtype. Local."""
    if codec.bits < 32 and parameters.dtype != np.float32:
        raise UserError(
            f"gradient_bits={codec.bits} needs float32 parameters, but these are "
            f"{parameters.dtype}; use 32 (full precision) for them"
        )
