"""Synchronous data-parallel SGD, with gradients of 32 bits down to 1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NoReturn

from ..communication import Communicator, InBackground
from ..errors import SharedError, UserError
from ..exchange import Exchange
from ..kernels import finish_on_device
from ..optimizers import LocalStep
from ..parameters import Parameters
from ..state import across, workspace
from ..validation import choice, settle
from .algorithm import Array
from .compressed import problem_with
from .overlapped import OverlappedExchange
from .synchronous import SynchronousAlgorithm, SynchronousState


@dataclass(kw_only=True)
class DataParallelState(SynchronousState):
    """
    Attributes:
        sent: [n], with double buffering: the gradient under way, then its sum; else None.
        sent_samples: of all ranks, in it; 0 where none is.
        sending: its exchange, in the background.
        overlapped: with overlap: the exchange of a gradient that is still being computed.
        local_step: the optimizer.
    """

    sent: Array | None = across("same", default=None)
    sent_samples: int = across("same", default=0)
    sending: InBackground[None] | None = workspace(default=None)
    overlapped: OverlappedExchange | None = workspace(default=None)
    local_step: LocalStep = workspace(default=None)

    counts: ClassVar[tuple[str, ...]] = ("sent_samples",)


@dataclass(frozen=True, kw_only=True)
class DataParallelSGD(SynchronousAlgorithm[DataParallelState]):
    """Each minibatch: sum the gradients of all ranks, divide by its samples, one local step.

        g = sum_k g_k / sum_k n_k

    With fewer than 32 bits the sum is quantized with error feedback, on the way to the ranks that
    add and on the way back. The options are those of every exchange: see `SynchronousAlgorithm`.

    Args:
        overlap: exchange buckets of the gradient in the background as soon as `Learner.ready` has
            told of their parameters, while the rest is computed. The same result, bit for bit.
            A rank whose gradient is not finite still refuses it, and nobody's model changes, but
            residuals then hold a part of that minibatch.
        double_buffering: let the exchange of a minibatch run while the next one is computed; the
            gradient that is applied is one minibatch old. `finish` applies the last one.

    All ranks hold bit-equal parameters after every step. Extra memory at 1 bit: 4 + 4/K bytes of
    residuals and about 0.4 bytes of buffers per parameter; 4 more with double buffering.

    Source: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; double buffering is its
    section 2.2, CNTK's useBufferedAsyncGradientAggregation. Unlike CNTK's, the residuals are never
    reset, and blocks have a fixed length instead of a matrix column's.
    """

    overlap: bool = False
    double_buffering: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(
            self,
            overlap=choice("overlap", self.overlap, (True, False)),
            double_buffering=choice("double_buffering", self.double_buffering, (True, False)),
        )
        if self.overlap and self.double_buffering:
            raise UserError(
                "overlap=True and double_buffering=True: at most one of them; with double "
                "buffering the exchange already runs beside the whole of the next minibatch"
            )

    def init(self, parameters: Parameters, comm: Communicator) -> DataParallelState:
        with self.ranks_apart(comm, apart=self.overlap or self.double_buffering) as ranks:
            state = DataParallelState(**self.first_exchange(parameters, ranks))
        if self.overlap:
            name = f"gradient exchange of rank {comm.rank}"
            state.overlapped = OverlappedExchange(state.buckets, name)
        if self.double_buffering:
            state.sent = parameters.like().flat
        return state

    def bind(self, state: DataParallelState, local_step: LocalStep) -> None:
        state.local_step = local_step

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
        total = self._agree(state, self._problem(state, gradient, samples, clock), samples, comm)
        if total == 0:
            return 0
        exchange = self.exchange_after(state, clock, parameters)
        if self.double_buffering:
            with comm.trace.span("wait"):
                self.wait(state)
            with comm.trace.span("update"):  # by the minibatch before
                local_step(state.sent, state.sent_samples, total)
            self._send(state, gradient.flat, total, exchange, comm)
            return total
        if state.overlapped is not None:
            with comm.trace.span("wait"):
                self._finish_overlapped(state, state.overlapped, gradient.flat, exchange)
        else:
            exchange.sum(gradient.flat, state.residuals)
        with comm.trace.span("update"):
            local_step(gradient.flat, total)
        return total

    def ready(
        self,
        state: DataParallelState,
        parameters: Parameters,
        gradient: Parameters,
        name: str,
        local_step: LocalStep,
    ) -> None:
        overlapped, clock = state.overlapped, local_step.samples
        if overlapped is None or not self.distributed(clock):
            return
        if not overlapped.running:
            exchange = self.exchange_after(state, clock, parameters)
            overlapped.begin(exchange, gradient.flat, state.residuals)
        overlapped.ready(name, self.fewest_bits(state, clock))

    def finish(
        self,
        state: DataParallelState,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        self.meet(state, comm)
        self._settle(state, comm)  # what `ready` has begun and no step has taken
        self.wait(state)
        if state.sent_samples:
            local_step(state.sent, state.sent_samples, 0)
            state.sent_samples = 0

    def meet(self, state: DataParallelState, comm: Communicator) -> None:
        self._agree(state, None, 0, comm)

    def fail(self, state: DataParallelState, problem: str, comm: Communicator) -> NoReturn:
        self._agree(state, problem, 0, comm)
        raise AssertionError("unreachable")

    def wait(self, state: DataParallelState) -> None:
        if state.sending is not None:
            state.sending.result()
            state.sending = None

    def close(self, state: DataParallelState, comm: Communicator, *, failed: bool = False) -> None:
        if not failed:
            self._settle(state, comm)
        elif state.overlapped is not None and state.overlapped.running:
            return  # to its end with the program's: nobody knows who else has begun
        super().close(state, comm, failed=failed)

    def bytes_sent(self, state: DataParallelState) -> int:
        self.wait(state)  # what is counted does not depend on how far it has come
        return super().bytes_sent(state)

    def _problem(
        self, state: DataParallelState, gradient: Parameters, samples: int, clock: int
    ) -> str | None:
        """Why this rank's gradient cannot be exchanged; None where it can."""
        bits, overlapped = self.fewest_bits(state, clock), state.overlapped
        if overlapped is None or not overlapped.running:
            return problem_with(gradient.flat, bits)
        if samples == 0:
            return "samples=0 must be more after learner.ready has told of a gradient"
        overlapped.all_ready(bits)
        return overlapped.problem

    def _agree(
        self, state: DataParallelState, problem: str | None, samples: int, comm: Communicator
    ) -> int:
        """`Communicator.agree`; where training ends, what is under way is brought to an end."""
        try:
            return comm.agree(problem, samples)
        except SharedError:
            self._settle(state, comm)
            raise

    def _settle(self, state: DataParallelState, comm: Communicator) -> None:
        if state.overlapped is not None:
            x = state.local_step.parameters
            exchange = self.exchange_after(state, state.local_step.samples, x)
            state.overlapped.settle(exchange, lambda: x.like().flat, state.residuals, comm)

    def _finish_overlapped(
        self,
        state: DataParallelState,
        overlapped: OverlappedExchange,
        vector: Array,
        exchange: Exchange,
    ) -> None:
        if not overlapped.running:  # this rank had nothing to tell, but others may have
            overlapped.begin(exchange, vector, state.residuals)
            overlapped.all_ready(32)
        overlapped.finish()

    def _send(
        self,
        state: DataParallelState,
        vector: Array,
        samples: int,
        exchange: Exchange,
        comm: Communicator,
    ) -> None:
        """Exchange a copy of the gradient while the next one is computed."""
        assert state.sent is not None
        state.sent[...] = vector
        finish_on_device(state.sent)
        state.sent_samples = samples
        summed = partial(exchange.sum_in_background, state.sent, state.residuals)
        state.sending = InBackground(f"gradient exchange of rank {comm.rank}", summed)
