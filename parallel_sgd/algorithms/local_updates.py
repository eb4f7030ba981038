"""Local updates with an outer optimizer: the core of model averaging, BMUF, SlowMo and DiLoCo.

At the beginning of a block all ranks hold the model Φ. Each rank takes local steps from Φ to x_k,
on n_k samples of its own. At the end of the block the ranks synchronize:

    reduce   G = sum_k n_k / N (Φ - x_k)        the pseudo-gradient, N = sum_k n_k
    outer    Φ <- outer step (Φ, G)             see `outer`
    merge    x_k <- Φ
    inner    the local optimizer's state is kept, zeroed, or averaged

Between two synchronizations ranks do not communicate.

With P fragments, each part of the model has blocks of its own, and the blocks of the parts end at
different times: the first block of part f is (f + 1) / P of a block long. A synchronization then
exchanges a P-th of the model, P times as often (Douillard et al., "Streaming DiLoCo with
overlapping communication", 2025, section 2.1).

With a quorum, an outer step does not wait for ranks that are late. A rank k that joins an outer
step with a change of a model that lacks a_k of the outer steps so far, takes part with

    term     1 / (1 + a_k) · n_k / N_k (Φ_old - x_k)     N_k: samples of all ranks in its block

and G is the sum of the terms of the ranks in the step. What a late rank has learned is missing in
one outer step, and comes with the next: with weights of 1 in place of 1 / (1 + a_k) nothing would
be lost or counted twice. Weights of 1 / (1 + a): Zhang et al., "Staleness-aware Async-SGD for
Distributed Deep Learning", IJCAI 2016, eq. 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import ClassVar, cast

import numpy as np

from ..communication import Communicator
from ..compression import problem_with_largest
from ..errors import SharedError, UserError
from ..exchange import Exchange, ExchangeOptions
from ..kernels import body
from ..options import Real, Whole, group, option, options
from ..parameters import Parameters
from ..validation import set_validated
from ..warning import warn
from .algorithm import Algorithm, Array, Minibatch, Work
from .data_parallel import WARM_START
from .exchange_state import ExchangeState
from .local_update_state import Fragment, LocalUpdateState
from .momentum_reset import reset_warning
from .outer import Averaging, Block, OuterStep
from .period import WHOLE, BlockPeriod
from .rounds import Answer, Call, Quorum, Rounds, weight_after
from .skipped import SavedOptimizer


@options
class LocalUpdates(Algorithm[LocalUpdateState]):
    """Local steps, and an outer step at the end of every block.

    The exchange has all options of exchanges, including error feedback: the quantization error of a
    pseudo-gradient is sent with the next.

    A step at the end of a block is collective: a sum of seven integers and an exchange (a rank
    sends 2·(K-1)/K models in 32 bits), and at most 10 passes over the model, 13 with overlap. With
    overlap the merge waits for the exchange, after a sum of its own. An averaged inner state is
    exchanged at the merge. A zeroed inner state loses its changes since the end of the block.

    With a quorum, a step at the end of a block waits until a quorum of ranks has come. Ranks wait
    for all others only to evaluate, save and finish, and train on announced minibatches, such as
    those of a source. Which ranks are late is a matter of time: a run does not repeat bit for bit.

    Extra memory per parameter: Φ and the outer momentum, 4 bytes each (float32), the exchange's
    buffers, and with overlap 4 more. The local step allocates nothing.

    Raises, from `step` and `finish` on all ranks: SharedError, if a minibatch is larger than a
    block, a rank has missed samples of a minibatch, a model is not finite, or a rank has failed. On
    a rank about to synchronize, `parameters` are then Φ.
    """

    synchronizes_every_step = False
    default_period: ClassVar[BlockPeriod] = BlockPeriod()
    """The period if no period option is given."""

    outer: OuterStep = group(Averaging)
    period: BlockPeriod = group(BlockPeriod)
    bounds: Quorum = group(Quorum)
    exchange: ExchangeOptions = group(ExchangeOptions)
    distributed_after: int = option(0, Whole(), WARM_START)
    overlap_samples: int = option(
        0,
        Whole(),
        "samples of all ranks on which the ranks train while the exchange runs, until its "
        "result is merged (at most one block); 0: wait for the exchange",
    )
    fragments: int = option(
        1,
        Whole(1),
        "parts of the model, by consecutive parameters: each is exchanged once in a period, one "
        "after the other, so that an exchange is short (Streaming DiLoCo)",
    )
    merge_weight: float | None = option(
        None,
        Real(most=1),
        "only with overlap (then 0.5 by default): weight of the local model when it is merged "
        "with the common model, x = merge_weight * x + (1 - merge_weight) * common; 0 discards "
        "the steps taken during the exchange",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_use("merge_weight", self.overlap_samples > 0, "overlap_samples of more than 0")
        if not self.period.given:
            set_validated(self, period=self.default_period)
        if not self.period.given:
            raise UserError("one of block_samples, sync_period, sync_steps must be given")
        if self.bounds.given:
            self._require_plain_blocks()

    def _require_plain_blocks(self) -> None:
        """Refuse options that need all ranks at the end of a block."""
        for name, plain in (("fragments", 1), ("overlap_samples", 0)):
            if getattr(self, name) != plain:
                raise UserError(
                    f"{name}={getattr(self, name)} must be {plain} with quorum or grace_s"
                )
        if self.outer.inner_state == "average":
            raise UserError(
                "the local optimizer's state must be kept or zeroed with quorum or grace_s, not "
                "averaged: ranks that are late would miss averages"
            )

    @property
    def has_quorum(self) -> bool:  # type: ignore[override]
        return self.bounds.given

    def init(self, work: Work) -> LocalUpdateState:
        x, comm = work.parameters, work.comm
        self.period.require_sample_of_each(comm.size)
        rule = work.optimizer.optimizer
        if self.outer.divides_by_rate and rule.lacks_rate:
            raise UserError(
                f"{type(self).__name__} divides by the local learning rate, but optimizer "
                f"{rule.lacks_rate}: give it one, or take another algorithm, such as DiLoCo"
            )
        if self.fragments > 1 and self.outer.inner_state == "zero" and rule.has_second_moment:
            raise UserError(
                f"fragments={self.fragments} must be 1 if the state of Adam is zeroed after each "
                "block: Adam counts the steps of the whole model; keep or average its state"
            )
        if work.minibatch_size is not None:
            self._require_minibatch(work.minibatch_size, comm)
        if self.bounds.given:
            self._require_for_quorum(work)
        exchange = ExchangeState.init(
            self.exchange,
            x,
            lambda: work.samples,
            comm,
            background=self.overlap_samples > 0,
            of_blocks=True,
            choices=work.choices,
            fragments=self.fragments,
        )
        averages = self.outer.inner_state == "average"

        def averaging(values: slice) -> Exchange | None:
            return Exchange(Parameters({"": x.flat[values]}), comm) if averages else None

        state = LocalUpdateState(
            exchange=exchange,
            start=x.like().flat,
            momentum=self.outer.init(x),
            sent=x.like().flat if self.overlap_samples else None,
            fragments={
                str(number): Fragment(
                    is_first=self.fragments > 1,
                    number=number,
                    values=values,
                    averaging=averaging(values),
                )
                for number, values in enumerate(exchange.parts)
            },
            rounds=Rounds(comm, self.bounds) if self.bounds.given else None,
        )
        state.start[...] = x.flat
        work.skipped.kept["optimizer"] = SavedOptimizer(work.optimizer.state)
        return state

    def _require_for_quorum(self, work: Work) -> None:
        """Refuse what needs all ranks at the end of a block. The same on all ranks."""
        self.bounds.of(work.comm.size)
        work.comm.require_fixed_ranks(
            "quorum and grace_s need ranks that stay: run without --survive"
        )

    def step(self, state: LocalUpdateState, work: Work, minibatch: Minibatch) -> None:
        samples, total = minibatch
        ranks = work.comm.size
        if state.warm:
            state.start[...], state.warm = work.parameters.flat, False
            self._warn_of_reset(work, total)
        self._require_minibatch(total, work.comm)
        if not any(fragment.steps for fragment in state.parts):
            work.skipped.keep(work.samples)
        if self.outer.divides_by_rate:
            state.lr = cast(float, work.optimizer.mean_lr(total / ranks))
        with work.comm.trace.span("update"):
            work.optimizer(work.gradient.flat, samples, total)
        for fragment in state.parts:
            fragment.own_samples += samples
            fragment.samples += total
            fragment.steps += 1
        for fragment in state.parts:
            if fragment.sent_samples and fragment.samples >= self.overlap_samples:
                self._merge(state, fragment, work)
            if self.period.ends(fragment.steps, fragment.samples, ranks, self._length(fragment)):
                if state.rounds is None:
                    self._synchronize(state, fragment, work, overlap=self.overlap_samples > 0)
                else:
                    self._join_round(state, state.rounds, work)
                fragment.is_first = False

    def _warn_of_reset(self, work: Work, samples: int) -> None:
        """Warn on rank 0 if blocks are too short for the momentum that each of them resets.

        Args:
            samples: of all ranks in a minibatch.

        Collective if there is something to warn of; local otherwise.
        """
        comm, name = work.comm, type(self).__name__
        momentum = work.optimizer.optimizer.momentum_for(samples / comm.size)
        text = reset_warning(name, self.outer, self.period, momentum, samples, comm.size)
        if text is not None:
            comm.together(lambda: warn(text) if comm.rank == 0 else None)

    def _length(self, fragment: Fragment) -> Fraction:
        """Return the length of a fragment's present block, as a part of a period."""
        return Fraction(fragment.number + 1, self.fragments) if fragment.is_first else WHOLE

    def _require_minibatch(self, samples: int, comm: Communicator) -> None:
        """Check that a minibatch is not longer than a block.

        After a failure of ranks longer minibatches are allowed: such a minibatch is a block by
        itself.
        """
        if comm.generation == 0:
            self.period.require_minibatch(samples, comm.size)

    def finish(self, state: LocalUpdateState, work: Work) -> None:
        for fragment in state.parts:
            if fragment.sent_samples:
                self._merge(state, fragment, work)
            if fragment.samples:
                self._synchronize(state, fragment, work, overlap=False)
            fragment.is_first = self.fragments > 1
        if not state.warm:
            work.parameters.flat[...] = state.start

    def first_calls(self, x: Array) -> list[Callable[[], object]]:
        kernels, out = body(x), x.copy() if self.overlap_samples else None
        calls = [
            *self.exchange.first_calls(),
            lambda: kernels.weighted_difference(x, x, 1.0, out),
        ]
        if self.outer.has_momentum:
            calls.append(lambda: kernels.outer_momentum_step(x, x, x, 1.0, 0.0, 1.0, False))
        else:
            calls.append(lambda: kernels.averaging_step(x, x))
        if self.overlap_samples:
            calls.append(lambda: kernels.mix(x, x, 1.0))
        return calls

    def replicated(self, state: LocalUpdateState, work: Work) -> bool:
        """See `Algorithm`. With fragments, True as the last fragment's block has ended: the other
        fragments then lack up to a block of a failed rank's learning."""
        return [*state.parts][-1].samples == 0

    def reconfigured(self, state: LocalUpdateState, work: Work) -> None:
        own = np.array([fragment.own_samples for fragment in state.parts], np.int64)
        for fragment, samples in zip(state.parts, work.comm.sum_integers(own), strict=True):
            fragment.samples = int(samples)
            if fragment.samples == 0:
                fragment.steps = 0

    def shared_model(self, state: LocalUpdateState, work: Work) -> Array:
        return work.parameters.flat if state.warm else state.start

    def replicas(self, state: LocalUpdateState, work: Work) -> Mapping[str, Array]:
        return {} if state.momentum is None else {"outer momentum": state.momentum}

    def skip(self, state: LocalUpdateState, work: Work) -> tuple[int, int]:
        """Skip the present blocks of all fragments on all ranks.

        `parameters` are Φ again. The local optimizer's state is restored to the beginning of the
        block, or zeroed if a checkpoint was loaded since, or with several fragments.
        """
        steps = max(fragment.steps for fragment in state.parts)
        samples, clock = max(fragment.samples for fragment in state.parts), work.samples
        work.parameters.flat[...] = state.start
        for fragment in state.parts:
            fragment.samples = fragment.own_samples = fragment.steps = 0
            fragment.is_first = self.fragments > 1
        if not work.skipped.restore(clock - samples, clock):
            work.optimizer.optimizer.reset(work.optimizer.state)
        return steps, samples

    def _synchronize(
        self, state: LocalUpdateState, fragment: Fragment, work: Work, *, overlap: bool
    ) -> None:
        """End a fragment's block. With overlap: only start the exchange."""
        if fragment.sent_samples:  # the block was shorter than the overlap
            self._merge(state, fragment, work)
        x = work.parameters.flat
        term = state.sent if overlap else x  # x is about to become Φ
        try:
            self._weigh(state, fragment, work, term)
        except SharedError:
            x[...] = state.start  # x may hold a term of G
            raise
        samples = fragment.samples
        if overlap:
            state.exchange.begin_sum(term, "block exchange", part=fragment.number)
            fragment.sent_samples, fragment.sent_lr = samples, state.lr
        else:
            state.exchange.sum(term, fragment.number)
        fragment.samples = fragment.own_samples = fragment.steps = 0
        if not overlap:
            self._outer_step(state, fragment, term, samples, state.lr, work)  # x becomes Φ
        if self.fragments == 1:
            work.skipped.keep(work.samples)

    def _join_round(self, state: LocalUpdateState, rounds: Rounds, work: Work) -> None:
        """End the block of this rank: take an outer step with the ranks that have come."""
        answer, members = rounds.ask(Call.BLOCK)
        if answer is Answer.ROUND:
            self._round(state, rounds, work, members, adds=True)
        else:
            work.group.meet()  # raises the problem of another rank

    def arrive(self, state: LocalUpdateState, work: Work, *, problem: bool = False) -> None:
        """Take part in the outer steps of ranks on their way, until all ranks have come."""
        (fragment, *_), rounds, x = state.parts, state.rounds, work.parameters.flat
        if rounds is None or work.samples < self.distributed_after:  # in the warm start all wait
            return
        call = Call.PROBLEM if problem else Call.MEETING
        answer, members = rounds.ask(call)
        while answer is Answer.ROUND:
            self._round(state, rounds, work, members, adds=False)
            answer, members = rounds.ask(call)
        if answer is Answer.MEET:
            blocks = work.comm.allgather_object(fragment.blocks)
            is_behind = fragment.blocks < max(blocks)
            if is_behind:
                x -= state.start
            fragment.blocks = rounds.catch_up(range(work.comm.size), blocks, _common(state))
            if is_behind:
                x += state.start
            state.exchange.sum_over(work.comm)

    def _round(
        self,
        state: LocalUpdateState,
        rounds: Rounds,
        work: Work,
        members: Sequence[int],
        *,
        adds: bool,
    ) -> None:
        """Take an outer step with some ranks. Collective among these.

        Args:
            adds: add this rank's change, as its block has ended. Otherwise the rank waits to meet
                all ranks, and keeps its change.
        """
        (fragment, *_), x, ranks = state.parts, work.parameters.flat, rounds.subset(members)
        samples = fragment.samples if adds else 0
        facts = ranks.allgather_object((fragment.blocks, work.samples, samples, state.lr))
        blocks, clocks, of_blocks, _ = zip(*facts, strict=True)
        newest, (_, _, _, lr) = max(blocks), max(facts)
        age = newest - fragment.blocks
        if adds:
            problem = self._weigh_own(state, fragment, work, x, weight_after(age))
            term = x
        else:
            problem, term = None, work.parameters.like().flat
            x -= state.start
        try:
            ranks.raise_together(problem)
        except SharedError:
            x[...] = state.start  # x may hold a term of G
            raise
        fragment.blocks = rounds.catch_up(members, blocks, _common(state))
        state.exchange.sum_over(ranks)
        state.exchange.sum(term, clock=max(clocks))
        if adds:
            fragment.samples = fragment.own_samples = fragment.steps = 0
        self._move(state, fragment, term, max(of_blocks), lr, work)
        if adds:
            self._treat_inner_state(fragment, work)
        else:
            x += state.start
        rounds.count(age if adds else 0)

    def _merge(self, state: LocalUpdateState, fragment: Fragment, work: Work) -> None:
        """With overlap: take the outer step of the block under way, and mix Φ into the model."""
        x = work.parameters.flat
        try:
            work.group.meet()  # a rank may have failed in place of this step
        except SharedError:
            x[...] = state.start  # this rank's own model may not be finite
            raise
        with work.comm.trace.span("wait"):
            state.exchange.wait(fragment.number)
        samples, lr = fragment.sent_samples, fragment.sent_lr
        self._outer_step(state, fragment, state.sent, samples, lr, work)
        fragment.sent_samples = 0
        weight = 0.5 if self.merge_weight is None else self.merge_weight
        body(x).mix(x[fragment.values], state.start[fragment.values], weight)

    def _weigh(self, state: LocalUpdateState, fragment: Fragment, work: Work, term: Array) -> None:
        """Compute this rank's term of G: term = n_k / N * (Φ - x).

        Args:
            term: [n], its part is written; may be the model itself.
        Raises:
            SharedError: on all ranks, if a model is not finite, or a rank has failed.
        """
        problem, comm = self._weigh_own(state, fragment, work, term), work.comm
        block = {
            "steps in the block": fragment.steps,
            "samples of all ranks in the block": fragment.samples,
        }
        samples = comm.agree(problem, fragment.own_samples, equal=block, steps=fragment.steps)
        if samples != fragment.samples:
            counts = comm.allgather_object(fragment.own_samples)
            raise SharedError(
                f"the ranks have trained on {samples} samples in this block ({counts} by rank), "
                f"but the block has {fragment.samples} samples: every rank must take a step "
                "with every sample of each minibatch"
            )

    def _weigh_own(
        self,
        state: LocalUpdateState,
        fragment: Fragment,
        work: Work,
        term: Array,
        factor: float = 1.0,
    ) -> str | None:
        """Compute this rank's term of G, times a factor. Return why it cannot be used, or None.
        Local.

        Args:
            term: see `_weigh`.
        """
        x, start = work.parameters.flat[fragment.values], state.start[fragment.values]
        weight = factor * self.outer.weight(fragment.own_samples, fragment.samples)
        out = None if term is work.parameters.flat else term[fragment.values]
        largest = body(x).weighted_difference(x, start, weight, out)
        change = "model's change over the block"
        problem = problem_with_largest(largest, state.exchange.fewest_bits, change)
        return work.skipped.problem(problem)

    def _outer_step(
        self,
        state: LocalUpdateState,
        fragment: Fragment,
        gradient: Array,
        samples: int,
        lr: float,
        work: Work,
    ) -> None:
        """Take the outer step, and keep, zero or average the inner state."""
        self._move(state, fragment, gradient, samples, lr, work)
        self._treat_inner_state(fragment, work)

    def _move(
        self,
        state: LocalUpdateState,
        fragment: Fragment,
        gradient: Array,
        samples: int,
        lr: float,
        work: Work,
    ) -> None:
        """Take the outer step. Local."""
        ranks, values = work.comm.size, fragment.values
        block = Block(samples, self.period.length(samples, ranks), lr, ranks)
        momentum = None if state.momentum is None else state.momentum[values]
        self.outer.step(state.start[values], momentum, gradient[values], block)
        fragment.blocks += 1

    def _treat_inner_state(self, fragment: Fragment, work: Work) -> None:
        """Keep, zero or average the inner state. Collective if it is averaged."""
        ranks, inner, values = work.comm.size, work.optimizer.state, fragment.values
        match self.outer.inner_state:
            case "zero" if self.fragments > 1:
                work.optimizer.optimizer.reset_part(inner, values)
            case "zero":
                work.optimizer.optimizer.reset(inner)
            case "average":
                assert fragment.averaging is not None
                inner.align(work.comm)
                for name, buffer in inner.buffers.items():
                    if self.outer.averages(name, fragment.blocks):
                        buffer[values] *= 1 / ranks
                        fragment.averaging.sum(buffer[values])


def _common(state: LocalUpdateState) -> list[Array]:
    """Return the vectors that an outer step changes: Φ, and its momentum if any."""
    return [state.start] if state.momentum is None else [state.start, state.momentum]
