"""Synchronous data-parallel SGD, with gradients of 32 bits down to 1/20 bit per value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..compression import problem_with
from ..errors import UserError
from ..exchange import ExchangeOptions, Projections
from ..options import Choice, Whole, group, option, options
from ..state import across
from .algorithm import Algorithm, Array, Minibatch, Work
from .exchange_state import ExchangeState

WARM_START = (
    "CNTK's warm start: until this count of samples, every rank trains on the whole minibatch, "
    "without exchange; then all ranks continue from rank 0's model"
)


@dataclass(kw_only=True)
class DataParallelState:
    """The state of data-parallel SGD.

    Attributes:
        exchange: of gradients.
        sent: [n], with double buffering: the gradient under way, then its sum; else None.
        sent_samples: samples of all ranks in `sent`; 0 if no gradient is under way.
    """

    exchange: ExchangeState
    sent: Array | None = across("same", default=None)
    sent_samples: int = across("same", least=0, default=0)


@options
class DataParallelSGD(Algorithm[DataParallelState]):
    """Each minibatch: sum the gradients of all ranks, divide by the samples, take a local step.

        g = sum_k g_k / sum_k n_k

    Below 32 bits the sum is quantized with error feedback, both on the way to the reducing ranks
    and on the way back. With overlap a rank still refuses a non-finite gradient, and no rank's
    model changes, but residuals then contain a part of that minibatch. With ``not_finite="skip"``
    every overlapped step first copies the residuals, and a skipped minibatch restores the copy.

    All ranks hold bit-equal parameters after every step. Extra memory at 1 bit: 4 + 4/K bytes of
    residuals and about 1 byte of buffers per parameter; 4 more with double buffering.

    Source: Seide, Fu, Droppo, Li, Yu, "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; double buffering is its
    section 2.2, CNTK's useBufferedAsyncGradientAggregation. Unlike CNTK's, the residuals are never
    reset, and blocks have a fixed length instead of a matrix column's.
    """

    exchange: ExchangeOptions = group(ExchangeOptions)
    distributed_after: int = option(0, Whole(), WARM_START)
    overlap: bool = option(
        False,
        Choice(False, True),
        "exchange each bucket of the gradient in the background as soon as Learner.ready has "
        "reported its parameters, while the rest is computed; the same bits, except with an "
        "entropy code, where each bucket then has its own step",
    )
    double_buffering: bool = option(
        False,
        Choice(False, True),
        "run the exchange of a minibatch while the next minibatch is computed; the gradient "
        "that is applied is one minibatch old",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap and self.double_buffering:
            raise UserError(
                "overlap=True and double_buffering=True: at most one of overlap, "
                "double_buffering may be given: with double buffering, the exchange already "
                "runs during the whole next minibatch"
            )

    def init(self, work: Work) -> DataParallelState:
        optimizer = work.optimizer

        def projected_step() -> int:
            step: int = optimizer.optimizer.projected_step(optimizer.state)
            return step

        exchange = ExchangeState.init(
            self.exchange,
            work.parameters,
            lambda: optimizer.state.samples,
            work.comm,
            background=self.double_buffering,
            overlap=self.overlap,
            projected_step=projected_step if optimizer.optimizer.has_second_moment else None,
            choices=work.choices,
        )
        if exchange.overlapped is not None:
            exchange.overlapped.restores_residuals = lambda: work.skipped.skips
        sent = work.parameters.like().flat if self.double_buffering else None
        return DataParallelState(exchange=exchange, sent=sent)

    def step(self, state: DataParallelState, work: Work, minibatch: Minibatch) -> None:
        if self.double_buffering:
            self._step_double_buffered(state, work, minibatch)
            return
        gradient = work.gradient.flat
        if self.overlap:
            with work.comm.trace.span("wait"):
                state.exchange.finish_overlapped(gradient)
        else:
            state.exchange.sum(gradient)
        with work.comm.trace.span("update"):
            self._update(state, work, gradient, minibatch.total)

    def _step_double_buffered(
        self, state: DataParallelState, work: Work, minibatch: Minibatch
    ) -> None:
        clock = work.samples
        with work.comm.trace.span("wait"):
            state.exchange.wait()
        with work.comm.trace.span("update"):
            self._update(state, work, state.sent, state.sent_samples, minibatch.total)
        assert state.sent is not None
        state.sent[...], state.sent_samples = work.gradient.flat, minibatch.total
        state.exchange.begin_sum(state.sent, "gradient exchange", clock)

    def finish(self, state: DataParallelState, work: Work) -> None:
        state.exchange.drain()  # sums begun by `ready` without a step
        state.exchange.wait()
        if state.sent_samples:
            self._update(state, work, state.sent, state.sent_samples, 0)
            state.sent_samples = 0

    def _update(
        self, state: DataParallelState, work: Work, gradient: Array | None, *samples: int
    ) -> None:
        """Take a local step with a sum. The optimizer receives the sum's quantization."""
        local = work.optimizer.state
        local.quantized = state.exchange.quantized()
        work.optimizer(gradient, *samples)
        local.quantized = None

    def replicas(self, state: DataParallelState, work: Work) -> Mapping[str, Array]:
        return work.optimizer.state.buffers

    def ready(self, state: DataParallelState, work: Work, name: str) -> None:
        state.exchange.ready(name, work.gradient.flat)

    def sum_late(self, state: DataParallelState, work: Work, vector: Array) -> None:
        state.exchange.sum(vector)

    def first_calls(self, x: Array) -> list[Callable[[], object]]:
        projections = Projections.first_calls(x) if self.quantizes_in_steps else []
        return [*self.exchange.first_calls(), *projections, *super().first_calls(x)]

    @property
    def quantizes_in_steps(self) -> bool:
        return self.exchange.has_entropy_code

    def problem(self, state: DataParallelState, work: Work, samples: int) -> str | None:
        overlapped = state.exchange.overlapped
        if overlapped is None or not overlapped.running:
            return problem_with(work.gradient.flat, state.exchange.fewest_bits)
        if samples == 0:
            return "samples=0 must be at least 1 after learner.ready has reported a gradient"
        overlapped.all_ready(state.exchange.fewest_bits)
        return overlapped.problem
