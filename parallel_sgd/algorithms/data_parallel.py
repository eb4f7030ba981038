"""Synchronous data-parallel SGD, with gradients of 32 bits down to 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from ..communication import Communicator
from ..compression import Codec, codec_for
from ..errors import UserError
from ..exchange import Exchange, FullPrecisionExchange, Residuals, TwoStageExchange
from ..kernels import body
from ..optimizers import LocalStep
from ..parameters import Parameters
from ..schedules import Steps
from .algorithm import Algorithm

LARGEST_GRADIENT = 1e30
"""Beyond it the sums of a block or of the ranks could overflow: taken for divergence."""


@dataclass
class DataParallelState:
    """
    Attributes:
        samples: seen by all ranks so far.
        residuals: what the messages of this rank have lost; None in full precision.
        exchanges: one for each number of bits, with its buffers; not part of a checkpoint.
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
        if self.distributed_after < 0:
            raise UserError(
                f"distributed_after={self.distributed_after} must be at least 0 samples"
            )
        bits = self.gradient_bits
        if isinstance(bits, Mapping) and (0 not in bits or min(bits) < 0):
            raise UserError(f"gradient_bits={dict(bits)!r} must begin at 0 samples")
        for each in [1, 16, *(bits.values() if isinstance(bits, Mapping) else [bits])]:
            self.codec(each)  # refuses a value that is wrong, in use or not

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
        exchanges: dict[int, Exchange] = {}
        residuals = None
        for bits in self._all_bits:
            exchange = TwoStageExchange(self.codec(bits), parameters, comm)
            residuals = residuals or exchange.residuals(parameters)
            exchanges[bits] = exchange
        return DataParallelState(0, residuals, exchanges)

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
        total = agree(comm, gradient, samples)
        if total:
            state.exchanges[self.bits_after(state.samples)].sum(gradient.flat, state.residuals)
            local_step(gradient.flat, total)
            state.samples += total
        return total

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
        agree(comm, gradient, samples)
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
        if isinstance(self.gradient_bits, Mapping):
            return int(Steps(self.gradient_bits)(samples))
        return self.gradient_bits

    @property
    def _all_bits(self) -> set[int]:
        bits = self.gradient_bits
        return set(bits.values()) if isinstance(bits, Mapping) else {bits}

    def fail(self, state: DataParallelState, problem: str, comm: Communicator) -> NoReturn:
        _agree(comm, 0, problem)
        raise AssertionError("unreachable")

    def distributed(self, state: DataParallelState) -> bool:
        return state.samples >= self.distributed_after

    def bytes_sent(self, state: DataParallelState) -> int:
        return sum(exchange.bytes_sent for exchange in state.exchanges.values())


def agree(comm: Communicator, gradient: Parameters, samples: int) -> int:
    """The samples of all ranks in this minibatch, once all gradients are known to be finite.

    Raises:
        SharedError: on all ranks, if any rank's gradient is not; nothing has been touched by
            then, so neither a residual nor a model ever holds what must not be there.

    Collective: one sum of two integers. Cost: reads the gradient once.
    """
    worst = body(gradient.flat).largest_magnitude(gradient.flat)
    problem = None
    if not worst <= LARGEST_GRADIENT:  # or NaN
        problem = (
            f"the gradient is not finite: its largest magnitude is {worst:g}, and at most "
            f"{LARGEST_GRADIENT:g} can be exchanged; a smaller learning rate may help"
        )
    return _agree(comm, samples, problem)


def _agree(comm: Communicator, samples: int, problem: str | None) -> int:
    total, problems = comm.sum_integers(np.array([samples, problem is not None], np.int64))
    if problems:
        comm.raise_together(problem)
    return int(total)
