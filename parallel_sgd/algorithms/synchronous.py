"""What algorithms have in common whose ranks meet in an exchange: residuals, warm start, errors.

`DataParallelSGD` exchanges gradients in every step; the local updates exchange models now and then.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..communication import Communicator
from ..exchange import (
    Exchange,
    FullPrecisionExchange,
    Residuals,
    TwoStageExchange,
    require_float32,
)
from ..optimizers import LocalStep
from ..parameters import Parameters
from ..state import workspace
from ..validation import integer, settle
from .compressed import CompressedAlgorithm, problem_with


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
class SynchronousAlgorithm(CompressedAlgorithm[SynchronousStateT], ABC):
    """Options of every exchange, beside those of `CompressedAlgorithm`.

    Args:
        distributed_after: train on the whole minibatch on every rank, without exchange, until so
            many samples have been seen (CNTK's warm start); then begin from rank 0's model.

    `gradient_bits` may be a mapping from samples to bits: ``{0: 32, 20_000: 1}``. The residuals
    stay when the bits change, and enter the next sum.

    Raises:
        UserError: an option's value that is not possible.
    """

    distributed_after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        after = integer("distributed_after", self.distributed_after, 0)
        settle(self, distributed_after=after)

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
