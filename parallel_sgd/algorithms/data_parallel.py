"""Synchronous data-parallel SGD, with gradients of 32 bits down to 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

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
from ..validation import choice, integer, points, settle
from .algorithm import Algorithm

LARGEST_GRADIENT = 1e30
"""With few bits. Beyond it the sums of a block could overflow: taken for divergence."""


@dataclass
class DataParallelState:
    """
    Attributes:
        samples: seen by all ranks so far.
        residuals: what the messages of this rank have lost; None in full precision.
        exchanges: the one for the present bits, with its buffers; not part of a checkpoint.
    """

    samples: int
    residuals: Residuals | None
    exchanges: dict[int, Exchange] = field(repr=False, metadata={"transient": True})


@dataclass(frozen=True, kw_only=True)
class DataParallelSGD(Algorithm[DataParallelState]):
    """Each minibatch: sum the gradients of all ranks, divide by its samples, one local step.

        g = sum_k g_k / sum_k n_k

    With fewer than 32 bits the sum is quantized with error feedback, on the way to the ranks that
    add and on the way back.

    Args:
        gradient_bits: 1, 2, 4, 8, 16 or 32 bits a value on the wire, or a mapping from samples to
            bits: ``{0: 32, 20_000: 1}``. 32 means the parameters' own precision. The residuals
            stay when the bits change, and enter the next sum.
        block_size: values that share quantization levels (1 to 8 bits).
        threshold: "zero" or "mean": how 1 bit splits a block (see `compression.OneBit`).
        half_format: "float16" or "bfloat16" for 16 bits.
        distributed_after: train on the whole minibatch on every rank, without exchange, until so
            many samples have been seen (CNTK's warm start); then begin from rank 0's model.
    Raises:
        UserError: an option's value that is not possible.

    All ranks hold bit-equal parameters after every step. Extra memory at 1 bit: 4 + 4/K bytes of
    residuals and about 0.4 bytes of buffers per parameter.

    Source: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014. Unlike CNTK's, the
    residuals are never reset, and blocks have a fixed length instead of a matrix column's.
    """

    gradient_bits: int | Mapping[int, int] = 32
    block_size: int = 1024
    threshold: str = "zero"
    half_format: str = "float16"
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

    def init(self, parameters: Parameters, comm: Communicator) -> DataParallelState:
        if self._all_bits == {32}:
            return DataParallelState(0, None, {32: FullPrecisionExchange(parameters, comm)})
        for bits in self._all_bits:
            require_float32(self.codec(bits), parameters)
        exchange = TwoStageExchange(self.codec(self.bits_after(0)), parameters, comm)
        residuals = exchange.residuals(parameters)
        return DataParallelState(0, residuals, {self.bits_after(0): exchange})

    def step(
        self,
        state: DataParallelState,
        parameters: Parameters,
        gradient: Parameters,
        samples: int,
        local_step: LocalStep,
        comm: Communicator,
    ) -> int:
        if not self.distributed(state):
            return self._train_alone(state, parameters, gradient, samples, local_step, comm)
        bits = self.bits_after(state.samples)
        total = agree(comm, problem_with(gradient, bits), samples)
        if total:
            self._exchange(state, bits, parameters, comm).sum(gradient.flat, state.residuals)
            local_step(gradient.flat, total)
            state.samples += total
        return total

    def _exchange(
        self, state: DataParallelState, bits: int, parameters: Parameters, comm: Communicator
    ) -> Exchange:
        """The exchange for so many bits; where the bits change, in place of the one before."""
        if bits not in state.exchanges:
            sent = self.bytes_sent(state)
            state.exchanges.clear()
            state.exchanges[bits] = TwoStageExchange(self.codec(bits), parameters, comm)
            state.exchanges[bits].bytes_sent = sent
        return state.exchanges[bits]

    def _train_alone(
        self,
        state: DataParallelState,
        parameters: Parameters,
        gradient: Parameters,
        samples: int,
        local_step: LocalStep,
        comm: Communicator,
    ) -> int:
        """One step of the warm start: all ranks have the same whole minibatch."""
        total, squares = _sums(comm, problem_with(gradient, bits=32), samples)
        if comm.size * squares != total**2:  # equal only where all ranks have the same number
            comm.require_agreement({"samples of a minibatch before distributed_after": samples})
        if samples:
            local_step(gradient.flat, samples)
            state.samples += samples
        if self.distributed(state):  # machines may round differently: all go on from one model
            for array in (parameters.flat, *local_step.state.buffers.values()):
                comm.broadcast(array)
        return samples

    def bits_after(self, samples: int) -> int:
        """The bits of an exchange after so many samples. Local."""
        bits = self.gradient_bits
        if isinstance(bits, Mapping):
            return bits[max(start for start in bits if start <= samples)]
        return bits

    @property
    def _all_bits(self) -> set[int]:
        bits = self.gradient_bits
        return set(bits.values()) if isinstance(bits, Mapping) else {bits}

    def fail(self, state: DataParallelState, problem: str, comm: Communicator) -> NoReturn:
        agree(comm, problem, 0)
        raise AssertionError("unreachable")

    def distributed(self, state: DataParallelState) -> bool:
        return state.samples >= self.distributed_after

    def bytes_sent(self, state: DataParallelState) -> int:
        return sum(exchange.bytes_sent for exchange in state.exchanges.values())


def agree(comm: Communicator, problem: str | None, samples: int) -> int:
    """The samples of all ranks in this minibatch, once no rank is known to have a problem.

    Raises:
        SharedError: on all ranks, if any has one; nothing has been touched by then, so neither a
            residual nor a model ever holds what must not be there.

    Collective: one sum of three integers.
    """
    total, _ = _sums(comm, problem, samples)
    return total


def problem_with(gradient: Parameters, bits: int) -> str | None:
    """Why a gradient cannot be exchanged with so many bits; None where it can.

    Full precision takes all that is finite: a sum that overflows shows in the next gradient.

    Local. Cost: reads the gradient once.
    """
    worst = body(gradient.flat).largest_magnitude(gradient.flat)
    if not math.isfinite(worst):
        return (
            f"the gradient is not finite: its largest magnitude is {worst}; "
            "a smaller learning rate may help"
        )
    if bits < 32 and worst > gradient.dtype.type(LARGEST_GRADIENT):
        return (
            f"the gradient is too large: its largest magnitude is {worst:.9g}, and at most "
            f"{LARGEST_GRADIENT:g} can be exchanged with gradient_bits={bits}; "
            "a smaller learning rate may help"
        )
    return None


def _sums(comm: Communicator, problem: str | None, samples: int) -> tuple[int, int]:
    """The sums over the ranks of `samples` and of its square."""
    own = np.array([samples, samples**2, problem is not None], np.int64)
    total, squares, problems = comm.sum_integers(own).tolist()
    if problems:
        comm.raise_together(problem)
    return total, squares


def _bits(_: str, value: Any) -> int:
    return choice("gradient_bits", value, GRADIENT_BITS)
