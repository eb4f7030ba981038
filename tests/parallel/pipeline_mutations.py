"""Faults of the pipeline that the tests must notice: see `mutations`."""

from __future__ import annotations

import numpy as np
from mutations import Mutation, nothing

from parallel_sgd.exchange import Residuals, reduction
from parallel_sgd.exchange.pipeline import Pipelined
from parallel_sgd.exchange.reduction import CompressedReduction, Reduction

FEW_BITS = [f"{what}, {bits}, pipelined" for what in ("conservation", "two stages")
            for bits in ("1 bit", "4 bits")]  # fmt: skip
TWO_STAGES = [f"two stages, {bits}, pipelined" for bits in ("1 bit", "32 bits")]


def neighbour(of, piece):
    """Another piece with as many bytes, or the same where there is none."""
    fitting = [
        other
        for other in of.pieces
        if other.tag != piece.tag
        and of.payload[other.bytes].nbytes == of.payload[piece.bytes].nbytes
    ]
    return fitting[0] if fitting else piece


def drops_a_piece(right, self, piece, vector):
    if piece.tag != 1:
        right(self, piece, vector)


def decodes_another_piece(right, self, piece, vector):
    sent = self.payload[neighbour(self, piece).bytes]
    self.codec.decode(piece.blocks, sent, vector[piece.values], add=False)


def decodes_twice(right, self, piece, vector):
    right(self, piece, vector)
    sent = self.payload[piece.bytes]
    self.codec.decode(piece.blocks, sent, vector[piece.values], add=True)


def encodes_twice(right, *arguments):
    right(*arguments)
    return right(*arguments)


def another_owner(right, self, piece, vector, residuals):
    """What an owner has to sum comes from the piece beside: its sender took the wrong one."""
    sent = right(self, piece, vector, residuals)
    beside = vector[neighbour(self, piece).values][: piece.size]
    if len(beside) == piece.size:
        unused = np.zeros(piece.size, np.float32)
        self.codec.encode(piece.blocks, beside, unused, sent)
    return sent


def senders_swapped(right, self, piece, host):
    """An owner takes the messages of two others for each other's."""
    others = [other for other in self.hosts if other != self.host]
    return right(self, piece, others[::-1][others.index(host)] if host in others else host)


def one_for_two(right, self, piece, vector, residuals):
    """An owner counts what one rank has sent twice, and another's not at all."""
    one, other = [other for other in self.hosts if other != self.host][:2]
    self.encoded_buffer(piece, one)[:] = self.encoded_buffer(piece, other)
    return right(self, piece, vector, residuals)


def from_the_last(right, arrays, place, at_a_time):
    copies = [array.copy() for array in arrays]
    arrays[place][:] = sum(copies[-2::-1], start=copies[-1])


def forgets_non_owned(right, self, values, vector):
    self.worker_error[values] = 0


def gives_non_owned_and_keeps_it(right, self, values, vector):
    kept = self.worker_error[values].copy()
    right(self, values, vector)
    self.worker_error[values] = kept


def does_not_wait(right, self, vector, residuals, is_ready):
    return right(self, vector, residuals, None)


NON_OWNED = Residuals, "give_non_owned"

PIPELINE_MUTATIONS = [
    Mutation("a piece dropped", CompressedReduction, "decode", drops_a_piece, FEW_BITS),
    Mutation("two pieces swapped", CompressedReduction, "decode", decodes_another_piece, FEW_BITS),
    Mutation("decoded twice", CompressedReduction, "decode", decodes_twice, FEW_BITS),
    Mutation("encoded twice", CompressedReduction, "encode", encodes_twice, FEW_BITS),
    Mutation("sent to the wrong owner", CompressedReduction, "encode", another_owner, FEW_BITS),
    Mutation(
        "two senders swapped", CompressedReduction, "encoded_buffer", senders_swapped, TWO_STAGES
    ),
    Mutation("one counted for two", CompressedReduction, "reduce", one_for_two, FEW_BITS),
    Mutation(
        "sums from the last rank on", reduction, "add_in_order", from_the_last, ["order, pipelined"]
    ),
    Mutation(
        "a host's other ranks forgotten", Reduction, "local_sum", nothing, ["hosts", "hosts, 1 bit"]
    ),
    Mutation("non-owned forgotten", *NON_OWNED, forgets_non_owned, ["non-owned residuals"]),
    Mutation("non-owned kept", *NON_OWNED, nothing, ["non-owned residuals"]),
    Mutation("non-owned twice", *NON_OWNED, gives_non_owned_and_keeps_it, ["non-owned residuals"]),
    Mutation("sent before it is ready", Pipelined, "sum", does_not_wait, ["readiness, pipelined"]),
]
