"""Synchronous data-parallel SGD, with gradients of 32 bits down to 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..communication import Communicator
from ..optimizers import LocalStep
from ..parameters import Parameters
from .compressed import problem_with
from .synchronous import SynchronousAlgorithm, SynchronousState

DataParallelState = SynchronousState


@dataclass(frozen=True, kw_only=True)
class DataParallelSGD(SynchronousAlgorithm[DataParallelState]):
    """Each minibatch: sum the gradients of all ranks, divide by its samples, one local step.

        g = sum_k g_k / sum_k n_k

    With fewer than 32 bits the sum is quantized with error feedback, on the way to the ranks that
    add and on the way back. The options are those of every exchange: see `SynchronousAlgorithm`.

    All ranks hold bit-equal parameters after every step. Extra memory at 1 bit: 4 + 4/K bytes of
    residuals and about 0.4 bytes of buffers per parameter.

    Source: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014. Unlike CNTK's, the
    residuals are never reset, and blocks have a fixed length instead of a matrix column's.
    """

    meets_in_every_step: ClassVar[bool] = True

    def init(self, parameters: Parameters, comm: Communicator) -> DataParallelState:
        residuals, exchanges = self.first_exchange(parameters, comm)
        return DataParallelState(residuals=residuals, exchanges=exchanges)

    def step(
        self,
        state: DataParallelState,
        parameters: Parameters,
        gradient: Parameters,
        samples: int,
        local_step: LocalStep,
        comm: Communicator,
        total: int | None = None,
    ) -> int:
        clock = local_step.samples
        if not self.distributed(clock):
            return self.train_alone(parameters, gradient, samples, local_step, comm)
        problem = problem_with(gradient.flat, self.bits_after(clock))
        total = comm.agree(problem, samples)
        if total:
            exchange = self.exchange_after(state, clock, parameters, comm)
            exchange.sum(gradient.flat, state.residuals)
            local_step(gradient.flat, total)
        return total
