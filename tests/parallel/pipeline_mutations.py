"""Faults of the pipeline that the tests must notice: see `mutations`."""

from __future__ import annotations

from typing import Any

import numpy as np
from mutations import Mutation

from parallel_sgd.exchange import pipeline, stages
from parallel_sgd.exchange.pipeline import Pipeline
from parallel_sgd.exchange.stages import CompressedStages, Stages

Run = pipeline._Run
FEW_BITS = [f"{what}, {bits}, pipelined" for what in ("conservation", "two stages")
            for bits in ("1 bit", "4 bits")]  # fmt: skip
TWO_STAGES = [f"two stages, {bits}, pipelined" for bits in ("1 bit", "32 bits")]


def neighbour(all_stages: Any, piece: Any) -> Any:
    """Another piece with as many bytes, or the same where there is none."""
    fitting = [
        each
        for each in all_stages.pieces
        if each.tag != piece.tag and all_stages.payload[each.bytes].nbytes
        == all_stages.payload[piece.bytes].nbytes
    ]  # fmt: skip
    return fitting[0] if fitting else piece


def drops_a_piece(right: Any) -> Any:
    def take(self: Any, piece: Any, vector: Any) -> None:
        if piece.tag != 1:
            right(self, piece, vector)

    return take


def takes_another_piece(right: Any) -> Any:
    def take(self: Any, piece: Any, vector: Any) -> None:
        sent = self.payload[neighbour(self, piece).bytes]
        self.codec.decode(piece.blocks, sent, vector[piece.values], add=False)

    return take


def decodes_twice(right: Any) -> Any:
    def take(self: Any, piece: Any, vector: Any) -> None:
        right(self, piece, vector)
        sent = self.payload[piece.bytes]
        self.codec.decode(piece.blocks, sent, vector[piece.values], add=True)

    return take


def encodes_twice(right: Any) -> Any:
    def contribute(self: Any, *arguments: Any) -> Any:
        right(self, *arguments)
        return right(self, *arguments)

    return contribute


def another_owner(right: Any) -> Any:
    """What an owner has to sum comes from the piece beside: its sender took the wrong one."""

    def contribute(self: Any, piece: Any, vector: Any, residuals: Any) -> Any:
        sent = right(self, piece, vector, residuals)
        beside = vector[neighbour(self, piece).values][: piece.size]
        if len(beside) == piece.size:
            unused = np.zeros(piece.size, np.float32)
            self.codec.encode(piece.blocks, beside, unused, sent)
        return sent

    return contribute


def senders_swapped(right: Any) -> Any:
    """An owner takes the contributions of two others for each other's."""

    def room(self: Any, piece: Any, host: int) -> Any:
        here = self.routes.host_of[self.rank]
        others = [each for each in range(len(self.routes.hosts)) if each != here]
        return right(self, piece, others[::-1][others.index(host)] if host in others else host)

    return room


def one_for_two(right: Any) -> Any:
    """An owner counts what one rank has sent twice, and another's not at all."""

    def total(self: Any, piece: Any, vector: Any, residuals: Any) -> Any:
        here = self.routes.host_of[self.rank]
        one, other = [each for each in range(len(self.routes.hosts)) if each != here][:2]
        self.contribution_room(piece, one)[:] = self.contribution_room(piece, other)
        return right(self, piece, vector, residuals)

    return total


def from_the_last(right: Any) -> Any:
    def add_in_order(arrays: Any, place: int, step: int) -> None:
        copies = [each.copy() for each in arrays]
        arrays[place][:] = sum(copies[-2::-1], start=copies[-1])

    return add_in_order


def forgets_strays(right: Any) -> Any:
    def begin(self: Any, bucket: int, *, stray: bool) -> None:
        all_stages = self.pipeline.stages[bucket]
        for piece in all_stages.pieces if stray else ():
            if not all_stages.gathers(piece):
                self.residuals.own[piece.values] = 0
        right(self, bucket, stray=False)

    return begin


def keeps_strays(right: Any) -> Any:
    return lambda self, bucket, *, stray: right(self, bucket, stray=False)


def adds_strays_twice(right: Any) -> Any:
    def begin(self: Any, bucket: int, *, stray: bool) -> None:
        kept = self.residuals.own.copy() if stray else None
        right(self, bucket, stray=stray)
        if stray:
            self.residuals.own[:] = kept

    return begin


def does_not_wait(right: Any) -> Any:
    return lambda self, vector, residuals, is_ready, **options: right(
        self, vector, residuals, None, **options
    )


def alone(right: Any) -> Any:
    return lambda self, piece, vector: None


PIPELINE_MUTATIONS = [
    Mutation("a piece dropped", CompressedStages, "take", drops_a_piece, FEW_BITS),
    Mutation("two pieces swapped", CompressedStages, "take", takes_another_piece, FEW_BITS),
    Mutation("decoded twice", CompressedStages, "take", decodes_twice, FEW_BITS),
    Mutation("encoded twice", CompressedStages, "contribute", encodes_twice, FEW_BITS),
    Mutation("sent to the wrong owner", CompressedStages, "contribute", another_owner, FEW_BITS),
    Mutation(
        "two senders swapped", CompressedStages, "contribution_room", senders_swapped, TWO_STAGES
    ),
    Mutation("one counted for two", CompressedStages, "total", one_for_two, FEW_BITS),
    Mutation(
        "sums from the last rank on", stages, "add_in_order", from_the_last, ["order, pipelined"]
    ),
    Mutation("a host's other ranks forgotten", Stages, "gather", alone, ["hosts", "hosts, 1 bit"]),
    Mutation("stray residual forgotten", Run, "begin", forgets_strays, ["stray residuals"]),
    Mutation("stray residual kept", Run, "begin", keeps_strays, ["stray residuals"]),
    Mutation("stray residual twice", Run, "begin", adds_strays_twice, ["stray residuals"]),
    Mutation("sent before it is ready", Pipeline, "sum", does_not_wait, ["readiness, pipelined"]),
]
