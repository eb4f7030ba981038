"""The arithmetic of an exchange with messages of variable length, known only to their encoder.

    encode         for the owner                  m_h = Encode(s_h + worker_error)
    add_up         the owner, in host order       owner_error += Decode(m_h)
    encode_sum     for all ranks                  m = Encode(owner_error)
    decode         all ranks                      g' = Decode(m)

An owner adds directly to its error, so little memory is touched when few values are sent. It
encodes only after adding up all of its pieces, because the step size depends on all of them
(`step_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..compression import Codec, VariableMessage
from ..kernels import empty_like
from .layout import CutBucket, Piece, Topology
from .reduction import Reduction
from .residuals import Residuals
from .step_sizes import Span, StepSizes

Array = Any  #: a NumPy or CuPy array


class VariableLengthReduction(Reduction):
    """Encodes with an entropy code, for all or for some of the parameters.

    Attributes:
        step_sizes: shared by all buckets that are encoded together.

    Memory for n values on K hosts: buffers of 2n times the codec's room (`EntropyCoded.blocks`).
    """

    step_sizes: StepSizes

    def __init__(
        self, cut: CutBucket, like: Array, rank: int, topology: Topology, codec: Codec
    ) -> None:
        super().__init__(cut, like, rank, topology, np.uint8)
        self.payload = empty_like(like, sum(self.counts), np.uint8)
        self._messages = {piece.tag: VariableMessage(codec, piece.blocks) for piece in self.pieces}

    def wire(self, vector: Array) -> Array:
        return self.payload

    @cached_property
    def own_pieces(self) -> list[Piece]:
        """The pieces that this rank owns."""
        return [piece for piece in self.pieces if piece.owner == self.rank]

    def sent_spans(self) -> list[Span]:
        """Return the values that this rank encodes for owners, as spans of the vector."""
        led = [piece for piece in self.pieces if self.leads(piece)]
        return [span for piece in led for span in self._spans(piece, "", 0)]

    def owned_spans(self) -> list[Span]:
        """Return the values that this rank encodes as an owner, as spans of its stripe."""
        begin = self.own.start
        return [span for piece in self.own_pieces for span in self._spans(piece, self.name, begin)]

    def _spans(self, piece: Piece, bucket: str, begin: int) -> list[Span]:
        first = piece.values.start - begin
        return [
            Span(codec, bucket, slice(first + values.start, first + values.stop))
            for codec, values in self._messages[piece.tag].entropy_coded()
        ]

    def encode(
        self, piece: Piece, vector: Array, residuals: Residuals | None, out: Array | None = None
    ) -> Array:
        """See `Reduction`.

        Args:
            out: receives the message at its beginning. Default: the piece's place in the payload.
        """
        assert residuals is not None
        values, error = vector[piece.values], residuals.worker_error[piece.values]
        out = self.payload[piece.bytes] if out is None else out
        # message <- Encode(values + error)
        # error   <- values + error - Decode(message)
        return self._messages[piece.tag].encode(
            values,
            error,
            out,
            lambda codec: self.step_sizes.of_worker(codec, vector, residuals),
        )

    def add_up(
        self, piece: Piece, residuals: Residuals | None, encoded: Sequence[Array]
    ) -> list[int]:
        """Add the messages of all hosts to the owner's error.

        Args:
            encoded: the messages, in the order of hosts; each may be followed by further bytes.
        Returns:
            The length of each message in bytes.
        """
        assert residuals is not None
        total = self._owned(piece, residuals)
        # owner_error <- owner_error + sum of Decode(the message of each host)
        return [self._messages[piece.tag].decode(message, total, True) for message in encoded]

    def encode_sum(
        self, piece: Piece, residuals: Residuals | None, out: Array | None = None
    ) -> Array:
        """Encode the sum for all ranks, once the owner has added up all of its pieces."""
        assert residuals is not None
        error = self._owned(piece, residuals)
        out = self.payload[piece.bytes] if out is None else out
        # message <- Encode(owner_error)
        # error   <- owner_error - Decode(message)
        return self._messages[piece.tag].encode(
            None, error, out, lambda codec: self.step_sizes.of_owner(codec, residuals)
        )

    def reduce(self, piece: Piece, vector: Array, residuals: Residuals | None) -> Array:
        raise AssertionError("a sum is encoded only when complete: call add_up, then encode_sum")

    def decode(self, piece: Piece, vector: Array, message: Array | None = None) -> int:
        """See `Reduction`. Return the length of the message in bytes."""
        message = self.payload[piece.bytes] if message is None else message
        return self._messages[piece.tag].decode(message, vector[piece.values], False)

    def quantized(self) -> list[slice]:
        """Return the slices of the vector that are quantized with a step size."""
        return [span.values for piece in self.pieces for span in self._spans(piece, "", 0)]

    def encoded_messages(self, piece: Piece) -> list[Array]:
        """Return the messages of all hosts at the owner, in the order of hosts."""
        own = self.payload[piece.bytes]
        return [
            own if host == self.host else self.encoded_buffer(piece, host) for host in self.hosts
        ]

    def message_in(self, piece: Piece, buffer: Array) -> Array:
        """Return the message at the beginning of a buffer."""
        return self._messages[piece.tag].beginning(buffer)

    def _owned(self, piece: Piece, residuals: Residuals) -> Array:
        begin = piece.values.start - self.own.start
        return residuals.owner_error[self.name][begin : begin + piece.size]


def share_step_sizes(reductions: Sequence[Reduction], *, by_bucket: bool) -> list[StepSizes]:
    """Give all buckets common step sizes, or each bucket its own. Local."""
    variable = [
        reduction for reduction in reductions if isinstance(reduction, VariableLengthReduction)
    ]
    groups = [[reduction] for reduction in variable] if by_bucket else [variable]
    shared = []
    for group in groups:
        sent = [span for reduction in group for span in reduction.sent_spans()]
        owned = [span for reduction in group for span in reduction.owned_spans()]
        steps = StepSizes(sent, owned)
        for reduction in group:
            reduction.step_sizes = steps
        shared.append(steps)
    return shared


def shares_step_sizes(reductions: Sequence[Reduction]) -> bool:
    """Return True if buckets share step sizes: then all must be ready before any is sent. Local."""
    steps = [
        reduction.step_sizes
        for reduction in reductions
        if isinstance(reduction, VariableLengthReduction)
    ]
    return len({*steps}) < len(steps)
