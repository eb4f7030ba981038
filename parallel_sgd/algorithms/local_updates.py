"""Local updates with an outer optimizer: the core of model averaging, BMUF, SlowMo and DiLoCo.

With Φ the model at the beginning of a block, every rank takes local steps from it to x_k on n_k
samples of its own; at the end of the block the ranks synchronize:

    reduce   G = sum_k n_k / N (Φ - x_k)        the block gradient, N = sum_k n_k
    outer    Φ <- outer step (Φ, G)             what each preset is
    merge    x_k <- Φ
    inner    the local optimizer's state is kept, zeroed, or averaged

Between two synchronizations nothing is communicated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, cast

from ..communication import Communicator, InBackground
from ..errors import SharedError, UserError
from ..exchange import Exchange
from ..kernels import array_module, finish_on_device
from ..optimizers import LocalStep
from ..parameters import Parameters
from ..state import across, workspace
from ..validation import choice, integer, number, require_use, settle
from .algorithm import Array
from .compressed import problem_with
from .synchronous import SynchronousAlgorithm, SynchronousState

InnerState = Literal["keep", "zero", "average"]
INNER_STATES: tuple[InnerState, ...] = ("keep", "zero", "average")


@dataclass(kw_only=True)
class LocalUpdateState(SynchronousState):
    """
    Attributes:
        start: [n], Φ: the model that all ranks had in common at the latest synchronization.
        momentum: [n], of the outer step; None where that has none.
        sent: [n], with overlap: the block gradient under way, or this rank's part of it; else None.
        sent_samples: of all ranks, in the block under way; 0 where none is.
        block_samples: of all ranks, in the present block so far.
        own_samples: of this rank, in the present block so far.
        block_steps: minibatches in the present block so far.
        lr, sent_lr: the local learning rate of the latest step, and of the last one of the block
            under way.
        warm: whether the warm start goes on, in which all ranks train the same model.
        averaging: for inner states that are averaged.
        sending: the exchange under way, in the background.
    """

    start: Array = across("same")
    momentum: Array | None = across("same")
    sent: Array | None = across("same")
    sent_samples: int = across("same", default=0)
    block_samples: int = across("same", default=0)
    own_samples: int = across("share", default=0)
    block_steps: int = across("same", default=0)
    lr: float = across("same", default=0.0)
    sent_lr: float = across("same", default=0.0)
    warm: bool = across("same", default=False)
    averaging: Exchange | None = workspace()
    sending: InBackground[None] | None = workspace(default=None)

    counts: ClassVar[tuple[str, ...]] = (
        *("sent_samples", "block_samples", "own_samples", "block_steps"),
        *("lr", "sent_lr"),
    )


@dataclass(frozen=True, kw_only=True)
class LocalUpdates(SynchronousAlgorithm[LocalUpdateState], ABC):
    """Options of every algorithm of this family.

    Args:
        block_samples: samples of all ranks in a block. Give at most one of these three.
        sync_period: samples of each rank in a block (on average, where they are uneven).
        sync_steps: minibatches in a block.
        overlap_samples: let the exchange run while the ranks train on so many further samples (of
            all ranks, at most until the next block ends), and merge its result then; 0: wait.
        merge_weight: only with overlap, and 0.5 if not given: the weight of the local model as it
            merges with the common one: x = merge_weight * x + (1 - merge_weight) * Φ. 0 forgets the
            steps taken meanwhile.

    A block ends with the minibatch that fills it. The exchange has the options of every exchange,
    error feedback included: what `gradient_bits` loses of one block gradient is sent with the next.

    A step in which a block ends is collective: one sum of four integers and one exchange (a rank
    sends 2·(K-1)/K models in 32 bits), and about 14 passes over the model. With overlap the merge
    waits for the exchange, after a sum of its own; an inner state that is averaged is exchanged
    then; and one that is zeroed loses what it has gathered since the block ended.

    Extra memory per parameter: Φ and the outer momentum, 4 bytes each (float32), the exchange's
    buffers, and with overlap 4 more. The local step allocates nothing.

    Raises, from `step` and `finish` on all ranks: SharedError, where a minibatch is larger than a
    block, a rank has left out samples of one, a model is not finite, or a rank has failed. A rank
    that was about to synchronize then holds Φ in `parameters`.
    """

    block_samples: int | None = None
    sync_period: int | None = None
    sync_steps: int | None = None
    overlap_samples: int = 0
    merge_weight: float | None = None

    default_period: ClassVar[dict[str, int]]
    """What holds where none of the three periods is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("block_samples", "sync_period", "sync_steps")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len(given) > 1:
            texts = " and ".join(f"{name}={value}" for name, value in given.items())
            raise UserError(f"{texts}: at most one of {', '.join(names)} may be given")
        period = {n: integer(n, v, 1) for n, v in (given or self.default_period).items()}
        overlap, weight = integer("overlap_samples", self.overlap_samples, 0), self.merge_weight
        if weight is not None:
            weight = number("merge_weight", weight, 0, most=1)
        require_use("merge_weight", weight, None, overlap > 0, "overlap_samples of more than 0")
        settle(self, **period, overlap_samples=overlap, merge_weight=weight)

    @abstractmethod
    def outer_step(
        self, state: LocalUpdateState, block_gradient: Array, samples: int, lr: float, ranks: int
    ) -> None:
        """Change `state.start` (Φ) and `state.momentum` by a block gradient. Local.

        Args:
            block_gradient: [n], G; may be changed.
            samples: of all ranks, in the block.
            lr: the local optimizer's learning rate in the block's last step.
            ranks: how many there are.
        """

    @property
    @abstractmethod
    def inner_policy(self) -> InnerState:
        """What becomes of the local optimizer's state at a synchronization."""

    @property
    def has_momentum(self) -> bool:
        """Whether the outer step uses `state.momentum`."""
        return True

    def share(self, own_samples: int, samples: int) -> float:
        """The weight of a rank's model in the reduction."""
        return own_samples / samples

    def block_size_on(self, ranks: int) -> int | None:
        """Samples of all ranks in a block; None where it is counted in minibatches."""
        return self.sync_period * ranks if self.sync_period is not None else self.block_samples

    def check_minibatch(self, samples: int, ranks: int) -> None:
        size = self.block_size_on(ranks)
        if size is None or samples <= size:
            return
        if self.sync_period is None:
            raise SharedError(
                f"block_samples={self.block_samples} must be at least a minibatch of all ranks, "
                f"{samples} samples"
            )
        raise SharedError(
            f"sync_period={self.sync_period} must be at least a rank's part of a minibatch: "
            f"{samples} samples on {ranks} ranks"
        )

    def check_block(self, ranks: int) -> None:
        """See that every rank can have a sample in a block. Local.

        Raises:
            SharedError: it cannot, with these options; alike on all ranks.
        """
        if self.block_samples is not None and self.block_samples < ranks:
            raise SharedError(
                f"block_samples={self.block_samples} must be at least the number of ranks, "
                f"{ranks}: they are samples of all ranks"
            )

    def init(self, parameters: Parameters, comm: Communicator) -> LocalUpdateState:
        self.check_block(comm.size)
        averages = self.inner_policy == "average"
        with self.ranks_apart(comm, apart=self.overlap_samples > 0) as ranks:
            first = self.first_exchange(parameters, ranks)
        return LocalUpdateState(
            **first,
            start=_copy(parameters),
            momentum=parameters.like().flat if self.has_momentum else None,
            sent=parameters.like().flat if self.overlap_samples else None,
            averaging=Exchange(parameters, comm) if averages else None,
            warm=self.distributed_after > 0,
        )

    def step(
        self,
        state: LocalUpdateState,
        parameters: Parameters,
        gradient: Parameters,
        samples: int,
        local_step: LocalStep,
        comm: Communicator,
        total: int | None = None,
    ) -> int:
        if not self.distributed(local_step.samples):
            total = self.train_alone(parameters, gradient, samples, local_step, comm)
            if self.distributed(local_step.samples):
                state.start[...] = parameters.flat
                state.warm = False
            return total
        if total is None:
            total = comm.agree(None, samples)
        if total == 0:
            return 0
        self.check_minibatch(total, comm.size)
        state.lr = local_step.lr
        with comm.trace.span("update"):
            local_step(gradient.flat, samples, total)
        state.own_samples += samples
        state.block_samples += total
        state.block_steps += 1
        if state.sent_samples and state.block_samples >= self.overlap_samples:
            self._merge(state, parameters, local_step, comm)
        if self._block_is_full(state, comm.size):
            overlap = self.overlap_samples > 0
            self._synchronize(state, parameters, local_step, comm, overlap=overlap)
        return total

    def finish(
        self,
        state: LocalUpdateState,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        self._meet_at_end(state, parameters, comm)
        if state.sent_samples:
            self._merge(state, parameters, local_step, comm)
        if state.block_samples:
            self._synchronize(state, parameters, local_step, comm, overlap=False)
        if not state.warm:
            parameters.flat[...] = state.start

    def shared_model(self, state: LocalUpdateState, parameters: Parameters) -> Array:
        return parameters.flat if state.warm else state.start

    def wait(self, state: LocalUpdateState) -> None:
        if state.sending is not None:
            state.sending.result()
            state.sending = None

    def close(self, state: LocalUpdateState, comm: Communicator, *, failed: bool = False) -> None:
        super().close(state, comm, failed=failed)
        if state.averaging is not None:
            state.averaging.close()

    def weight(self, state: LocalUpdateState) -> int:
        return state.own_samples

    def bytes_sent(self, state: LocalUpdateState) -> int:
        self.wait(state)  # what is counted does not depend on how far it has come
        averaging = state.averaging.bytes_sent if state.averaging else 0
        return super().bytes_sent(state) + averaging

    def _block_is_full(self, state: LocalUpdateState, ranks: int) -> bool:
        size = self.block_size_on(ranks)
        if size is None:
            assert self.sync_steps is not None
            return state.block_steps >= self.sync_steps
        return state.block_samples >= size

    def _synchronize(
        self,
        state: LocalUpdateState,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
        *,
        overlap: bool,
    ) -> None:
        """The end of a block: the whole of it, or with overlap its beginning."""
        if state.sent_samples:  # the block was shorter than the overlap
            self._merge(state, parameters, local_step, comm)
        x, clock = parameters.flat, local_step.samples
        difference = x  # which is about to become Φ
        if overlap:
            assert state.sent is not None
            difference = state.sent
            difference[...] = x
        try:
            self._weigh(state, difference, clock, comm)
        except SharedError:
            x[...] = state.start  # a model again
            raise
        exchange = self.exchange_after(state, clock, parameters)
        samples = state.block_samples
        state.block_samples = state.own_samples = state.block_steps = 0

        if overlap:
            finish_on_device(difference)
            reduce = partial(exchange.sum_in_background, difference, state.residuals)
            state.sending = InBackground(f"block exchange of rank {comm.rank}", reduce)
            state.sent_samples, state.sent_lr = samples, state.lr
            return
        exchange.sum(difference, state.residuals)
        self._close(state, difference, samples, state.lr, local_step, comm)
        x[...] = state.start

    def _merge(
        self,
        state: LocalUpdateState,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        """With overlap: take the outer step of the block under way, and mix Φ into the model."""
        x = parameters.flat
        self._meet_at_end(state, parameters, comm)
        with comm.trace.span("wait"):
            self.wait(state)
        self._close(state, state.sent, state.sent_samples, state.sent_lr, local_step, comm)
        state.sent_samples = 0
        x -= state.start
        x *= 0.5 if self.merge_weight is None else self.merge_weight
        x += state.start

    def _meet_at_end(
        self, state: LocalUpdateState, parameters: Parameters, comm: Communicator
    ) -> None:
        """Before ranks synchronize: one may have failed in place of this step. Collective."""
        try:
            self.meet(state, comm)
        except SharedError:
            if not state.warm:
                parameters.flat[...] = state.start  # this rank's own model may not be finite
            raise

    def _weigh(self, state: LocalUpdateState, x: Array, clock: int, comm: Communicator) -> None:
        """Turn a copy of this rank's model into its term of G: x = n_k / N * (Φ - x).

        Raises:
            SharedError: on all ranks, where a model is not finite, or a rank has failed.
        """
        array_module(x).subtract(state.start, x, out=x)
        problem = problem_with(x, self.fewest_bits(state, clock), "model's change over the block")
        block = {
            "steps in the block": state.block_steps,
            "samples of all ranks in the block": state.block_samples,
        }
        samples = comm.agree(problem, state.own_samples, alike=block, steps=state.block_steps)
        if samples != state.block_samples:
            counts = comm.allgather_object(state.own_samples)
            raise SharedError(
                f"the ranks have trained on {samples} samples in this block ({counts} by rank), "
                f"but were to get {state.block_samples}: every rank must take a step with all of "
                "each minibatch"
            )
        x *= self.share(state.own_samples, samples)

    def _close(
        self,
        state: LocalUpdateState,
        block_gradient: Array,
        samples: int,
        lr: float,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        """The outer step, and what becomes of the inner state."""
        self.outer_step(state, block_gradient, samples, lr, comm.size)
        local = local_step.state
        match self.inner_policy:
            case "zero":
                local_step.optimizer.reset(local)
            case "average":
                assert state.averaging is not None
                for buffer in local.buffers.values():
                    buffer *= 1 / comm.size
                    state.averaging.sum(buffer)


@dataclass(frozen=True, kw_only=True)
class LocalUpdatesWithInnerState(LocalUpdates, ABC):
    """Local updates that leave it to the user what becomes of the local optimizer's state.

    Args:
        inner_state: at a synchronization: "keep", "zero", or "average" (one more 32-bit exchange
            for each of its vectors).
    """

    inner_state: str = "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, inner_state=choice("inner_state", self.inner_state, INNER_STATES))

    @property
    def inner_policy(self) -> InnerState:
        return cast(InnerState, self.inner_state)


def _copy(parameters: Parameters) -> Array:
    copy = parameters.like().flat
    copy[...] = parameters.flat
    return copy
