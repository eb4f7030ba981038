"""The sum of all ranks' vectors, compressed both on the way to its owners and back.

The vector is cut into one stripe a rank, on block borders. Every rank sends stripe j to rank j,
which adds what it gets in rank order and sends the sum to all. With a lossy codec both messages
are encoded, each with a residual of its own, and over any number of steps

    sum of all results + sum of residuals.total + sum of residuals.own == sum of all inputs

to rounding (docs/algorithms.md; Seide et al. 2014, §3.3). The second residual is what a plain
all-reduce of quantized gradients would lose.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..communication import Communicator
from ..compression import Codec
from ..errors import UserError
from ..kernels import array_module, empty_like
from ..parameters import Parameters
from .exchange import Residuals

Array = Any  #: a NumPy or CuPy array

IN_CACHE = 64  #: blocks that an owner sums at a time, so that the sum stays in cache (256 KiB)


class TwoStageExchange:
    """Sums vectors of one layout over all ranks, with one codec.

    Args:
        codec: how values travel.
        parameters: their layout decides blocks and stripes.
        comm: the ranks.
        error_feedback: False forgets what is lost: the residuals are zero after every sum.
    Raises:
        UserError: a lossy codec for parameters that are not float32.

    Memory for n values of b bits on K ranks: buffers of about 3n·b/8 bytes beside the residuals
    of 4n + 4n/K. Creation is local.
    """

    def __init__(
        self,
        codec: Codec,
        parameters: Parameters,
        comm: Communicator,
        *,
        error_feedback: bool = True,
    ) -> None:
        require_float32(codec, parameters)
        self.codec, self.comm, self.error_feedback = codec, comm, error_feedback
        self.bytes_sent = 0  #: by this rank to others, over all exchanges so far
        blocks = codec.blocks(parameters)
        # Rank j owns the blocks that begin in the j-th of K equal parts of the vector.
        edges = np.arange(1, comm.size) * parameters.flat.size / comm.size
        inner = np.searchsorted(blocks.starts, edges).tolist()
        stripes = [blocks.part(a, b) for a, b in pairwise([0, *inner, len(blocks)])]
        own = stripes[comm.rank]
        self._blocks, self._own_values, self._own_bytes = blocks, own.values, own.bytes
        step = IN_CACHE if array_module(parameters.flat) is np else max(len(own), 1)
        parts = [own.part(i, min(i + step, len(own))) for i in range(0, len(own), step)]
        self._own_parts = [
            (part, _relative(part.values, own.values), _relative(part.bytes, own.bytes))
            for part in parts
        ]
        self._counts = [s.bytes.stop - s.bytes.start for s in stripes]
        self._receive_counts = [self._counts[comm.rank]] * comm.size
        self._payload = empty_like(parameters.flat, sum(self._counts), np.uint8)
        self._received = empty_like(parameters.flat, sum(self._receive_counts), np.uint8)
        to_owners = sum(self._counts) - self._counts[comm.rank]
        self._bytes_per_sum = to_owners + (comm.size - 1) * self._counts[comm.rank]

    def residuals(self, parameters: Parameters) -> Residuals:
        """Zeros, with which training starts. Local."""
        own = empty_like(parameters.flat, parameters.flat.size)
        total = empty_like(parameters.flat, self._own_values.stop - self._own_values.start)
        own.fill(0)
        total.fill(0)
        return Residuals(own, total)

    def sum(self, vector: Array, residuals: Residuals | None) -> None:
        """Replace `vector` by (the decoded form of) its sum over all ranks.

        Args:
            vector: [n], finite; on return the same bits on all ranks.
            residuals: updated.

        Collective: two calls. Cost: sends 2·(K-1)/K·n·b/8 bytes (and the levels) per rank; reads
        and writes memory for an encode of n values, K decodes of n/K, an encode of n/K, and a
        decode of n.
        """
        assert residuals is not None
        assert len(residuals.own) == len(vector)
        assert len(residuals.total) == self._own_values.stop - self._own_values.start
        codec, comm, payload = self.codec, self.comm, self._payload
        self.bytes_sent += self._bytes_per_sum

        codec.encode(self._blocks, vector, residuals.own, payload)
        comm.alltoall(payload, self._counts, self._received, self._receive_counts)

        total, encoded = vector[self._own_values], payload[self._own_bytes]
        stripes = self._received.reshape(comm.size, -1)
        for part, values, place in self._own_parts:
            for k in range(comm.size):
                codec.decode(part, stripes[k, place], total[values], add=k > 0)
            codec.encode(part, total[values], residuals.total[values], encoded[place])

        comm.allgather(encoded, payload, self._counts)
        codec.decode(self._blocks, payload, vector, add=False)
        if not self.error_feedback:
            residuals.own.fill(0)
            residuals.total.fill(0)


def require_float32(codec: Codec, parameters: Parameters) -> None:
    """Refuse a lossy codec for parameters of another dtype. Local."""
    if codec.bits < 32 and parameters.dtype != np.float32:
        raise UserError(
            f"gradient_bits={codec.bits} needs float32 parameters, but these are "
            f"{parameters.dtype}; use 32 (full precision) for them"
        )


def _relative(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)
