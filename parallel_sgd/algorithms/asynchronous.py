"""Asynchronous SGD: workers push to parameter servers and pull from them, each at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import numpy as np

from .. import runtime
from ..compression import AUTO, problem_with
from ..embedding import Table, Tables
from ..errors import NotFinite, SharedError, SharedProblem, UserError
from ..exchange import Exchange
from ..kernels import array_module, empty_like, finish_on_device
from ..options import Folder, Whole, group, option, options, values_of
from ..parameter_server import (
    Connection,
    Kind,
    ParameterServers,
    PlacementOptions,
    RemoteTable,
    Rules,
    ServerGroup,
    choose_push_bits,
)
from ..validation import set_validated
from .algorithm import Algorithm, Array, Minibatch, Work
from .asynchronous_state import NO_NUMBER, DataParallelASGDState
from .data_parallel import WARM_START
from .period import Period
from .ramp import Ramp
from .skipped import SavedOptimizer


@options
class DataParallelASGD(Algorithm[DataParallelASGDState]):
    """Asynchronous SGD: each period, a worker pushes and pulls without waiting for all workers.

        push   gradients:      g_k, summed over the period;  a server steps   x <- optimizer(x, g_k)
               model updates:  Δ_k = x_pulled - x_k;         a server takes   x <- x - Δ_k
        pull   x_k <- x

    Every server holds a part of the model (`parallel_sgd.parameter_server.place`). The learner's
    optimizer runs on the servers if gradients are pushed, and on every worker if model updates are
    pushed. The servers' clock, the basis of their learning rate, counts the samples of all applied
    pushes. A worker's own clock (`learner.samples`) is its position in the data, in samples of all
    workers.

    Staleness is the number of changes of the model between a worker's pull and its push:
    `learner.report()`. With several servers each part of the model has its own version.

    A step within a period is local. The end of a period takes a message and an answer per server,
    in total n values each way (a push in `gradient_bits`). `finish` waits for all workers. The
    default period is 256 samples of each worker.

    With `ranks_per_worker` a worker is several ranks: g_k is their sum, one of them pushes and
    pulls, and all have the same model. Then the end of a period takes a sum over the worker's ranks
    and a broadcast, too; with model updates, every step takes a sum.

    Source: Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012 (async); Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013
    (bounded); Zheng et al., ICML 2017 (delay compensation); CNTK's DataParallelASGD (updates, ramp)
    and PaddlePaddle Fluid (placement, geo).
    """

    synchronizes_every_step = False
    default_period: ClassVar[Period] = Period(sync_period=256)

    roles: ParameterServers = group(ParameterServers)
    rules: Rules = group(Rules)
    period: Period = group(Period)
    ramp_up: Ramp = group(Ramp)
    places: PlacementOptions = group(PlacementOptions)
    tables: tuple[Table, ...] = option(
        (),
        Tables(),
        "what servers hold in addition to the model: embedding tables (Embedding) and arrays "
        "(ArrayTable)",
        python_only=True,
    )
    distributed_after: int = option(0, Whole(), WARM_START)
    record: str | None = option(
        None,
        Folder(),
        "a folder in which every server records the order of its answers to workers",
    )
    replay: str | None = option(
        None,
        Folder(),
        "a recorded folder: servers answer in the recorded order, so the run repeats bit for "
        "bit, also in `parallel-sgd simulate`",
    )

    def __post_init__(self) -> None:
        self.require_at_most_one("record", "replay")
        super().__post_init__()
        if self.tables and self.distributed_after:
            raise UserError(
                f"distributed_after={self.distributed_after} must be 0 with tables: before, "
                "every worker trains on the whole minibatch, so each row would get the same "
                "gradient from every worker"
            )
        if self.tables and self.roles.ranks_per_worker != 1:
            raise UserError(
                f"ranks_per_worker={self.roles.ranks_per_worker!r} must be 1 with tables: every "
                "rank pulls and pushes rows of its own minibatch"
            )
        if not self.period.given:
            set_validated(self, period=self.default_period)

    @property
    def asynchronous(self) -> bool:  # type: ignore[override]
        return self.rules.mode != "sync"

    def init(self, work: Work) -> DataParallelASGDState:
        ranks, rules, x = cast(ServerGroup, work.group), self.rules, work.parameters
        world, servers = ranks.world, len(ranks.servers)
        rules.require_for(x)
        self._require_rate(work)
        placement = world.together(lambda: self.places.place(x, servers))
        bits, measured = None, None
        begins = world.generation == 0  # else ranks have failed, and training resumes
        if begins:
            world.require_agreement({"placement": placement.servers})
        if begins and AUTO in rules.usual_bits:
            largest, block_size = placement.largest, rules.compression.block_size
            bits, measured = choose_push_bits(
                world, x, largest, len(ranks.workers), block_size, rules.possible_bits
            )
        connection = Connection(ranks, x, placement, rules, self.tables)
        try:
            record, replay = (self.record, self.replay) if begins else (None, None)
            world.together(lambda: connection.open_order(record, replay, self._facts()))
        except SharedError:  # perhaps on another server: leave no recording to the next start
            connection.order.discard()
            raise
        state = DataParallelASGDState(
            work=work,
            rules=rules,
            ramp=self.ramp_up,
            declared=self.tables,
            distributed_after=self.distributed_after,
            bits=bits,
            measured=measured,
            connection=connection,
            tables=connection.remote_tables(),
            began=self.distributed_after == 0,
            worker=NO_NUMBER if ranks.within is None else ranks.worker,
            local_sum=None if ranks.within is None else Exchange(x, ranks.within),
        )
        if not ranks.serves:
            for table in state.tables.values():
                if isinstance(table, RemoteTable):
                    table.skipped = work.skipped
            flat = x.flat
            if rules.pushes_updates:
                work.skipped.kept["optimizer"] = SavedOptimizer(work.optimizer.state)
            state.base = flat.copy() if rules.pushes_updates else None
            state.residual = None if rules.lossless else x.like().flat
            if rules.pipeline or rules.pushes_updates:
                state.sent = empty_like(flat, flat.size)
            if rules.pipeline:
                state.incoming = empty_like(flat, flat.size)
        connection.bind(work.optimizer.optimizer)
        if not ranks.serves:
            self._warm_up(state, work)
            state.client.factor = self.ramp_up.factor(0)
            state.since = runtime.perf_counter()
        return state

    @property
    def optimizer_on_servers(self) -> bool:  # type: ignore[override]
        return not self.rules.pushes_updates

    def _require_rate(self, work: Work) -> None:
        """Refuse a ramp of the learning rate for an optimizer without one. Local."""
        lacks = work.optimizer.optimizer.lacks_rate
        if self.ramp_up.ramp_minibatches and lacks:
            raise UserError(
                f"ramp_minibatches={self.ramp_up.ramp_minibatches} changes the learning rate, "
                f"but optimizer {lacks}"
            )

    def first_calls(self, x: Array) -> list[Callable[[], object]]:
        return [*self.rules.first_calls(), *super().first_calls(x)]

    def _facts(self) -> dict[str, str]:
        """Return the options that determine the workers' requests and their order."""
        apart = {"servers", "role", "record", "replay"}
        return {name: repr(v) for name, v in values_of(self).items() if name not in apart}

    def _warm_up(self, state: DataParallelASGDState, work: Work) -> None:
        """Compile the kernels before training, so that no worker is delayed by its first push."""
        x, zeros = work.parameters, work.parameters.like().flat
        problem_with(x.flat, 32, "model")
        for bits in self.rules.possible_bits if state.bits is None else (state.bits,):
            for part in state.client.parts:
                part.encoded(zeros, state.residual, bits)  # leaves a residual of 0
        if state.base is not None and array_module(x.flat) is np:
            work.optimizer.compile()

    def step(self, state: DataParallelASGDState, work: Work, minibatch: Minibatch) -> None:
        if state.connection.finished:
            raise UserError("step() after finish(): this worker has disconnected from its servers")
        state.minibatch = minibatch
        (samples, total), gradient = minibatch, work.gradient.flat
        factor, clock = self.ramp_up.factor(state.minibatches), work.samples
        if state.period_steps == 0:
            work.skipped.keep(clock)
        if self.rules.pushes_updates:
            of_worker = state.sum_within(gradient, samples)
            local = work.optimizer.state
            given = local.lr_factor
            local.lr_factor = given * factor
            try:
                work.optimizer(gradient, of_worker, total)
            finally:
                local.lr_factor = given
        else:
            work.optimizer(gradient, 0, total)  # advances the clock only: servers take the step
        state.gathered_samples += samples
        state.period_samples += total
        state.period_steps += 1
        ends = self.period.ends(state.period_steps, state.period_samples, work.comm.size)
        if not self.rules.pushes_updates and (state.gathered is not None or not ends):
            gradient = state.gather(gradient)
        if ends:
            with work.comm.trace.span("exchange"):
                self._exchange(state, work, gradient, factor, clock)
        self._end_step(state)

    def _end_step(self, state: DataParallelASGDState) -> None:
        minibatch, state.minibatch = state.minibatch, None
        for table in state.tables.values():
            table.step_taken()
        grouped = state.local_sum is not None  # then the clock is of all ranks of the worker
        state.minibatches += minibatch is not None and (minibatch.samples > 0 or grouped)
        # For the next minibatch's rows of embedding tables.
        state.client.factor = self.ramp_up.factor(state.minibatches)

    def resume(self, state: DataParallelASGDState, work: Work) -> None:
        """Complete the interrupted work of this worker with the new servers. Local."""
        client, models = state.client, state.next_models()
        if models:
            client.in_order(lambda: client.push_parts(Kind.PUSH_BACKUP, models))
        pending = client.pending_push
        if pending is not None:
            client.in_order(lambda: client.retry_push(pending))
        exchanging = state.exchanging
        if exchanging is not None:
            if pending is not None and not self.rules.pipeline:
                self._end_exchange(state, work)
            else:
                self._exchange(state, work, *exchanging)
        if state.minibatch is not None:
            self._end_step(state)

    def end_warm_start(self, state: DataParallelASGDState, work: Work) -> None:
        super().end_warm_start(state, work)
        state.start_servers()

    def _exchange(
        self,
        state: DataParallelASGDState,
        work: Work,
        gathered: Array,
        factor: float,
        clock: int,
    ) -> None:
        """End a period: push and pull.

        Args:
            gathered: [n], the summed gradients; not used for model updates.
            factor: of the learning rate.
            clock: determines the bits of the push.
        """
        state.exchanging = gathered, factor, clock
        client, x = state.client, work.parameters.flat
        samples = self._sum_within(state, gathered)
        bits = state.bits_after(clock)
        blocked = client.blocked_s - state.blocked
        client.statistics.seconds.compute += runtime.perf_counter() - state.since - blocked
        state.wait()
        client.count_waiting_within()
        vector = gathered
        if state.base is not None:
            vector = array_module(x).subtract(state.base, x, out=state.sent)  # Δ_k
        if samples and not self._can_push(state, work, vector, bits):
            samples = 0
        state.served.discard()
        if not self.rules.pipeline:
            lost = state.residual
            # Push g_k or Δ_k, and pull: x_k <- x.
            client.in_order(lambda: client.push(vector, lost, samples, factor, x, bits))
        else:
            self._merge_arrived(state, x, vector)
            if state.base is None:
                cast(Array, state.sent)[...] = vector
            else:
                state.base[...] = x
            state.arrived = state.incoming
            finish_on_device(x)
            sent, arrived, residual = state.sent, state.arrived, state.residual
            state.sending = client.begin(
                lambda: client.push(sent, residual, samples, factor, arrived, bits)
            )
        self._end_exchange(state, work)

    @staticmethod
    def _sum_within(state: DataParallelASGDState, gathered: Array) -> int:
        """Sum the gathered gradients over the ranks of this worker, in place. Return the gathered
        samples of these ranks."""
        if state.base is None:
            if state.local_sum is not None and (problem := problem_with(gathered)):
                state.work.skipped.add_problem(problem)  # in the sum its rank cannot be seen
            return state.sum_within(gathered, state.gathered_samples)
        return state.group.sum_within(state.gathered_samples, Kind.PUSH)  # summed in every step

    def _end_exchange(self, state: DataParallelASGDState, work: Work) -> None:
        client, state.exchanging = state.client, None
        if state.base is not None and not self.rules.pipeline:
            state.base[...] = work.parameters.flat
        state.gathered_samples = state.period_samples = state.period_steps = 0
        if state.gathered is not None:
            state.gathered.fill(0)
        work.skipped.keep(work.samples)
        state.since, state.blocked = runtime.perf_counter(), client.blocked_s

    def _can_push(
        self, state: DataParallelASGDState, work: Work, vector: Array, bits: float
    ) -> bool:
        """Return True if `vector` can be pushed. Otherwise skip the period or end training.

        Training ends on all ranks, by `work.group.fail`.
        """
        name, skipped = "gradient" if state.base is None else "model", work.skipped
        problem = problem_with(vector, self.rules.fewest(bits), name)
        if state.local_sum is None:
            problem = skipped.problem(problem)
        else:
            problem = state.problem_within(skipped.problem(None), problem)
        if not problem:
            return True
        skips = skipped.skips and isinstance(problem, NotFinite)
        ended: str | None = problem
        if skips:
            begun, now = work.samples - state.period_samples, work.samples
            ended = skipped.count(problem, *self.skip(state, work), begun, now)
        elif state.base is not None:
            work.parameters.flat[...] = state.base
        if ended:
            # Of several ranks in a worker, the problem names those with it.
            work.group.fail(ended if state.local_sum is None else SharedProblem(ended))
        if state.base is not None:
            vector.fill(0)
        return False

    def skip(self, state: DataParallelASGDState, work: Work) -> tuple[int, int]:
        """Return this worker to the start of its period, and drop the gathered gradients.

        Servers receive a push without samples instead. Rows of embedding tables pushed before
        remain changed, except in mode "sync".
        """
        restored = work.skipped.restore(work.samples - state.period_samples, work.samples)
        if state.base is not None:
            work.parameters.flat[...] = state.base
            if not restored:
                work.optimizer.optimizer.reset(work.optimizer.state)
        state.client.statistics.skipped += 1
        return state.period_steps, state.gathered_samples

    def _merge_arrived(self, state: DataParallelASGDState, x: Array, update: Array) -> None:
        """Continue from the arrived model and the local steps taken since the push."""
        if state.arrived is None:
            return
        if state.base is None:
            x[...] = state.arrived
        else:
            array_module(x).subtract(state.arrived, update, out=x)
        state.arrived = None

    def finish(self, state: DataParallelASGDState, work: Work) -> None:
        if state.connection.finished:
            return
        if state.in_warm_start:
            work.group.meet()  # another worker may still be in a step
            self.end_warm_start(state, work)
        if state.group.sum_within(state.gathered_samples, Kind.LEAVE):
            gathered = work.parameters.flat if state.gathered is None else state.gathered
            factor = self.ramp_up.factor(state.minibatches - 1)  # of the last minibatch
            self._exchange(state, work, gathered, factor, work.samples)
        state.leave()

    def shared_model(self, state: DataParallelASGDState, work: Work) -> Array:
        return work.parameters.flat if state.base is None or state.in_warm_start else state.base
