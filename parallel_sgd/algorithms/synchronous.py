"""What algorithms have in common whose ranks meet in an exchange: quantization, warm start, errors.

`DataParallelSGD` exchanges gradients in every step; the local updates exchange models now and then.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..communication import Communicator
from ..compression import GRADIENT_BITS, Codec, HalfPrecision, OneBit, codec_for
from ..exchange import (
    Exchange,
    FullPrecisionExchange,
    Residuals,
    TwoStageExchange,
    require_float32,
)
from ..kernels import body
from ..optimizers import LocalStep
from ..parameters import Parameters
from ..state import workspace
from ..validation import choice, integer, points, settle
from .algorithm import Algorithm, Array

LARGEST = 1e30
"""With few bits. Beyond it the sums of a block could overflow: taken for divergence."""


@dataclass(kw_only=True)
class SynchronousState:
    """
    Attributes:
        residuals: what the messages of this rank have lost; None in full precision.
        exchanges: the one for the present bits, with its buffers.
    """

    residuals: Residuals | None
    exchanges: dict[int, Exchange] = workspace()


SynchronousStateT = TypeVar("SynchronousStateT", bound=SynchronousState)


@dataclass(frozen=True, kw_only=True)
class SynchronousAlgorithm(Algorithm[SynchronousStateT], ABC):
    """Options of every exchange.

    Args:
        gradient_bits: 1, 2, 4, 8, 16 or 32 bits a value on the wire, or a mapping from samples to
            bits: ``{0: 32, 20_000: 1}``. 32 means the parameters' own precision. The residuals
            stay when the bits change, and enter the next sum.
        block_size: values that share quantization levels (1 to 8 bits).
        threshold: "zero" or "mean": how 1 bit splits a block (see `compression.OneBit`).
        half_format: "float16" or "bfloat16" for 16 bits.
        error_feedback: whether what a message loses is sent with the next one. Without it few
            bits do not converge: only to see what it is for.
        distributed_after: train on the whole minibatch on every rank, without exchange, until so
            many samples have been seen (CNTK's warm start); then begin from rank 0's model.
    Raises:
        UserError: an option's value that is not possible.
    """

    gradient_bits: int | Mapping[int, int] = 32
    block_size: int = 1024
    threshold: str = "zero"
    half_format: str = "float16"
    error_feedback: bool = True
    distributed_after: int = 0

    def __post_init__(self) -> None:
        one_bit = OneBit(block_size=self.block_size, threshold=self.threshold)
        half = HalfPrecision(format=self.half_format)
        bits = self.gradient_bits
        settle(
            self,
            gradient_bits=points("gradient_bits", bits, _bits)
            if isinstance(bits, Mapping)
            else _bits("gradient_bits", bits),
            block_size=one_bit.block_size,
            threshold=one_bit.threshold,
            half_format=half.format,
            error_feedback=choice("error_feedback", self.error_feedback, (True, False)),
            distributed_after=integer("distributed_after", self.distributed_after, 0),
        )

    def codec(self, bits: int) -> Codec:
        """The codec that these options mean at so many bits."""
        return codec_for(
            bits,
            block_size=self.block_size,
            threshold=self.threshold,
            half_format=self.half_format,
        )

    def bits_after(self, samples: int) -> int:
        """The bits of an exchange after so many samples. Local."""
        bits = self.gradient_bits
        if isinstance(bits, Mapping):
            return bits[max(start for start in bits if start <= samples)]
        return bits

    def distributed(self, samples: int) -> bool:
        return samples >= self.distributed_after

    def bytes_sent(self, state: SynchronousStateT) -> int:
        return sum(exchange.bytes_sent for exchange in state.exchanges.values())

    def first_exchange(
        self, parameters: Parameters, comm: Communicator
    ) -> tuple[Residuals | None, dict[int, Exchange]]:
        """The residuals and exchanges with which a state begins. Local.

        Raises:
            UserError: fewer than 32 bits for parameters that are not float32.
        """
        bits = self.gradient_bits
        all_bits = set(bits.values()) if isinstance(bits, Mapping) else {bits}
        if all_bits == {32}:
            return None, {32: FullPrecisionExchange(parameters, comm)}
        for each in all_bits:
            require_float32(self.codec(each), parameters)
        exchange = self._two_stage(self.bits_after(0), parameters, comm)
        return exchange.residuals(parameters), {self.bits_after(0): exchange}

    def exchange_after(
        self,
        state: SynchronousStateT,
        samples: int,
        parameters: Parameters,
        comm: Communicator,
    ) -> Exchange:
        """The exchange after so many samples; where the bits change, in place of the one before.

        Local.
        """
        bits = self.bits_after(samples)
        if state.residuals is not None and bits not in state.exchanges:
            sent = sum(exchange.bytes_sent for exchange in state.exchanges.values())
            state.exchanges.clear()
            state.exchanges[bits] = self._two_stage(bits, parameters, comm)
            state.exchanges[bits].bytes_sent = sent
        return state.exchanges[bits]

    def _two_stage(self, bits: int, parameters: Parameters, comm: Communicator) -> TwoStageExchange:
        return TwoStageExchange(
            self.codec(bits), parameters, comm, error_feedback=self.error_feedback
        )

    def train_alone(
        self,
        parameters: Parameters,
        gradient: Parameters,
        samples: int,
        local_step: LocalStep,
        comm: Communicator,
    ) -> int:
        """One step of the warm start: all ranks have the same whole minibatch. Collective."""
        name = "samples of a minibatch before distributed_after"
        comm.agree(problem_with(gradient.flat), samples, alike=name)
        ends = self.distributed(local_step.samples + samples)
        if samples:
            local_step(gradient.flat, samples)
        if ends:  # machines may round differently: all go on from one model
            for array in (parameters.flat, *local_step.state.buffers.values()):
                comm.broadcast(array)
        return samples


def problem_with(vector: Array, bits: int = 32, name: str = "gradient") -> str | None:
    """Why a vector cannot be exchanged with so many bits; None where it can.

    Full precision takes all that is finite: a sum that overflows shows in the next gradient.

    Local. Cost: reads the vector once.
    """
    worst = body(vector).largest_magnitude(vector)
    if not math.isfinite(worst):
        return (
            f"the {name} is not finite: its largest magnitude is {worst}; "
            "a smaller learning rate may help"
        )
    if bits < 32 and worst > vector.dtype.type(LARGEST):
        return (
            f"the {name} is too large: its largest magnitude is {worst:.9g}, and at most "
            f"{LARGEST:g} can be exchanged with gradient_bits={bits}; "
            "a smaller learning rate may help"
        )
    return None


def _bits(_: str, value: Any) -> int:
    return choice("gradient_bits", value, GRADIENT_BITS)
