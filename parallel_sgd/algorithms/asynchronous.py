"""Asynchronous SGD: workers push to parameter servers and pull from them, each at its own pace."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np

from ..communication import Communicator
from ..embedding import RemoteTable, check_tables
from ..errors import SharedError, SharedProblem, UserError
from ..exchange import require_float32
from ..kernels import array_module, empty_like, finish_on_device
from ..optimizers import LocalStep
from ..parameter_server import (
    Client,
    Connection,
    compile_step,
    form,
    roles,
)
from ..parameters import Parameters
from ..validation import check_counts
from .algorithm import Array
from .asynchronous_options import AsynchronousAlgorithm
from .asynchronous_state import DataParallelASGDState
from .compressed import problem_with
from .served_state import ServedState


@dataclass(frozen=True, kw_only=True)
class DataParallelASGD(AsynchronousAlgorithm[DataParallelASGDState]):
    """Every period a worker pushes what it has found, and pulls the model; nobody waits for all.

        push   gradients:  g_k, summed over the period;  a server steps   x <- optimizer(x, g_k)
               deltas:     Δ_k = x_pulled - x_k;         a server takes   x <- x - Δ_k
        pull   x_k <- x

    Every server holds a part of the model (`parallel_sgd.parameter_server.place`). The optimizer
    given to the learner is that of the servers where gradients are pushed, and every worker's own
    where deltas are. The servers' clock, by which their learning rate goes, is the samples of all
    pushes that they have applied; a worker's own clock (`learner.samples`) is how far it has come
    in the data, in samples of all workers.

    Staleness is the number of times that the model has changed between a worker's pull and its
    push: `learner.report()`. With several servers each part of a model has its own version.

    A step within a period is local. At its end: one message and one answer for each server, n
    values each way in all (a push in `gradient_bits`). `finish` waits for all workers.

    Source: Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012 (async); Ho et al.,
    "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013
    (bounded); Zheng et al., ICML 2017 (delay compensation); CNTK's DataParallelASGD (deltas, ramp)
    and PaddlePaddle Fluid (placement, geo).
    """

    def workers(self, comm: Communicator) -> list[int]:
        return roles(comm, self.servers, self.role)[0]

    def init(self, parameters: Parameters, comm: Communicator) -> DataParallelASGDState:
        rules = self.rules
        require_float32(rules.codec, parameters)
        group = form(comm, self.servers, self.role)
        placement = comm.together(lambda: self.place(parameters, len(group.servers)))
        comm.require_agreement({"placement": placement.servers})
        connection = Connection(
            group,
            parameters,
            placement,
            rules,
            self.tables,
            error_feedback=self.error_feedback,
        )
        try:
            comm.together(lambda: connection.open_order(self.record, self.replay, self.ordered))
        except SharedError:  # of another server: the next start is to find no recording of this one
            connection.discard_order()
            raise
        state = DataParallelASGDState(connection=connection, tables=connection.remote_tables())
        if not group.serves:
            x = parameters.flat
            state.base = x.copy() if self.currency == "deltas" else None
            state.residual = parameters.like().flat if rules.codec.bits < 32 else None
            if self.pipeline or self.currency == "deltas":
                state.sent = empty_like(x, x.size)
            if self.pipeline:
                state.incoming = empty_like(x, x.size)
        return state

    def bind(self, state: DataParallelASGDState, local_step: LocalStep) -> None:
        state.connection.bind(local_step.optimizer)
        if not self.serves(state):
            self._warm_up(state, local_step)
            state.client.factor = self.ramp_factor(0)
            state.since = time.perf_counter()

    def _warm_up(self, state: DataParallelASGDState, local_step: LocalStep) -> None:
        """Have the kernels ready: the others would be far ahead of a first push that compiles."""
        x, parameters = local_step.parameters.flat, local_step.parameters
        problem_with(x, cast(int, self.gradient_bits), "model")
        zeros = parameters.like().flat
        for part in state.client.parts:
            part.encoded(zeros, state.residual)  # of which nothing is left
        if state.base is not None and array_module(x) is np:
            compile_step(local_step.optimizer, parameters)

    def group(self, state: DataParallelASGDState, comm: Communicator) -> Communicator:
        return state.connection.group.own

    def serves(self, state: DataParallelASGDState) -> bool:
        return state.connection.group.serves

    def serve(
        self,
        state: DataParallelASGDState,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        if not state.finished:
            state.finished = True
            state.connection.serve()

    def step(
        self,
        state: DataParallelASGDState,
        parameters: Parameters,
        gradient: Parameters,
        samples: int,
        local_step: LocalStep,
        comm: Communicator,
        total: int | None = None,
    ) -> int:
        if state.finished:
            raise UserError("step() after finish(): this worker has left its servers")
        client = state.client
        if total is None:  # only in mode "sync" do workers know of each other
            total = samples * comm.size if self.apart else self._sum(client, samples)
        if self.currency == "deltas":
            local_step.state.lr_factor = self.ramp_factor(state.minibatches)
            local_step(gradient.flat, samples, total)
        else:
            local_step(gradient.flat, 0, total)  # only the clock: servers take the step
        state.gathered_samples += samples
        state.period_samples += total
        state.period_steps += total > 0
        client.factor = self.ramp_factor(state.minibatches + 1)  # for the next minibatch's rows
        ends = self.period_ends(state.period_steps, state.period_samples, comm.size)
        gathered = gradient.flat
        if self.currency == "gradients" and (state.gathered is not None or not ends):
            gathered = self._gather(state, gradient.flat)
        if ends:
            factor = self.ramp_factor(state.minibatches)
            with comm.trace.span("exchange"):
                self._exchange(state, parameters.flat, gathered, factor, comm)
        state.minibatches += samples > 0
        return total

    def _gather(self, state: DataParallelASGDState, gradient: Array) -> Array:
        """The summed gradients of a period with several minibatches, so far."""
        if state.gathered is None:
            state.gathered = gradient.copy()
        else:
            state.gathered += gradient
        return state.gathered

    def _exchange(
        self,
        state: DataParallelASGDState,
        x: Array,
        gathered: Array,
        factor: float,
        comm: Communicator,
    ) -> None:
        """The end of a period: push, and pull."""
        client, samples = state.client, state.gathered_samples
        blocked = client.blocked_s - state.blocked
        client.statistics.seconds.compute += time.perf_counter() - state.since - blocked
        self.wait(state)
        vector = gathered
        if state.base is not None:
            vector = array_module(x).subtract(state.base, x, out=state.sent)
        self._require_sound(state, x, vector, samples, comm)
        state.served.forget()
        if not self.pipeline:
            client.in_turn(lambda: client.push(vector, state.residual, samples, factor, out=x))
            if state.base is not None:
                state.base[...] = x
        else:
            self._take(state, x, vector)
            if state.base is None:
                cast(Array, state.sent)[...] = vector
            else:
                state.base[...] = x
            state.arrived = state.incoming
            finish_on_device(x)
            sent, arrived, residual = state.sent, state.arrived, state.residual
            state.sending = client.begin(
                lambda: client.push(sent, residual, samples, factor, out=arrived)
            )
        state.gathered_samples = state.period_samples = state.period_steps = 0
        if state.gathered is not None:
            state.gathered.fill(0)
        state.since, state.blocked = time.perf_counter(), client.blocked_s

    def _require_sound(
        self,
        state: DataParallelASGDState,
        x: Array,
        vector: Array,
        samples: int,
        comm: Communicator,
    ) -> None:
        """End training for all where what is to be pushed cannot be."""
        if not samples:
            return
        name = "gradient" if state.base is None else "model"
        problem = problem_with(vector, cast(int, self.gradient_bits), name)
        if problem:
            if state.base is not None:
                x[...] = state.base
            self.fail(state, problem, comm)

    def _take(self, state: DataParallelASGDState, x: Array, delta: Array) -> None:
        """Go on from the model that has arrived, and from the local steps taken meanwhile."""
        if state.arrived is None:
            return
        if state.base is None:
            x[...] = state.arrived
        else:
            array_module(x).subtract(state.arrived, delta, out=x)
        state.arrived = None

    def finish(
        self,
        state: DataParallelASGDState,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        if state.finished:
            return
        x, client = parameters.flat, state.client
        if state.gathered_samples:
            gathered = x if state.gathered is None else state.gathered
            factor = self.ramp_factor(state.minibatches - 1)  # of the last one
            self._exchange(state, x, gathered, factor, comm)
        self.wait(state)
        state.table = client.in_turn(lambda: client.leave(out=x))
        state.finished = True
        living = [worker for worker, each in enumerate(state.table) if not each.lost]
        if living[0] == comm.rank != 0:
            print(
                "parallel_sgd: the first worker is lost: what it alone does, such as to write "
                "results, is not done",
                file=sys.stderr,
                flush=True,
            )
        client.close()
        state.connection.end()
        if state.base is not None:
            state.base[...] = x
        state.arrived = None

    def shared_model(self, state: DataParallelASGDState, parameters: Parameters) -> Array:
        return parameters.flat if state.base is None else state.base

    def wait(self, state: DataParallelASGDState) -> None:
        sending, state.sending = state.sending, None
        if sending is not None:
            with state.connection.group.own.trace.span("wait"):
                sending.result()

    def meet(self, state: DataParallelASGDState, comm: Communicator) -> None:
        if not self.serves(state):
            client = state.client
            client.in_turn(client.meet)

    @staticmethod
    def _sum(client: Client, samples: int) -> int:
        """Wait for all workers, through a server; the sum of their samples."""
        return client.in_turn(lambda: client.sum_samples(samples))

    def fail(self, state: DataParallelASGDState, problem: str, comm: Communicator) -> NoReturn:
        if state.finished:
            raise SharedError(problem)
        text, client = problem, state.client
        if not isinstance(problem, SharedProblem):  # which names its ranks itself
            text = f"{problem} (on rank {state.connection.group.world.rank})"
        client.in_turn(lambda: client.fail(text))
        raise SharedError(text)

    def check_saved(
        self,
        state: DataParallelASGDState,
        saved: Mapping[str, Any],
        parameters: Parameters,
        local_step: LocalStep,
        ranks: int,
    ) -> None:
        check_counts(saved, state.counts, "algorithm")
        x = parameters.flat
        for name in ("gathered", "arrived"):
            found = saved[name]
            if found is not None and (found.shape, found.dtype) != (x.shape, x.dtype):
                raise UserError(f"has algorithm.{name} that is no {x.dtype} [{x.size}]")
        buffers = len(local_step.state.buffers) if self.currency == "gradients" else 0
        own = state.connection.group.own.rank
        ServedState.check(saved["served"], x, buffers, ranks, first=own == 0)

    def check_elsewhere(self, state: DataParallelASGDState, folder: str) -> None:
        check_tables(self.tables, folder)

    def close(
        self, state: DataParallelASGDState, comm: Communicator, *, failed: bool = False
    ) -> None:
        if not failed:
            self.wait(state)
        state.connection.close(finished=state.finished, failed=failed)

    def collect(
        self,
        state: DataParallelASGDState,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        self.wait(state)
        if state.finished:  # there are no servers any more
            return
        client, x = state.client, parameters.flat
        buffers = len(local_step.state.buffers) if state.base is None else 0
        client.in_turn(lambda: state.served.collect(client, x, buffers, comm))

    def restored(
        self,
        state: DataParallelASGDState,
        parameters: Parameters,
        local_step: LocalStep,
        comm: Communicator,
    ) -> None:
        client = state.client
        client.factor = self.ramp_factor(state.minibatches)
        for table in state.tables.values():
            table.forget_prefetched()
        if not state.served.fits(comm):  # of another number of workers: all begin from the servers'
            workers = state.served.workers
            state.served.take_over(comm)
            model, state.arrived = state.served.model, None
            if state.base is None:
                parameters.flat[...] = model
            else:  # with what they had gone on from theirs, as far as it counts
                share = workers / comm.size if self.merge == "sum" else 1.0
                state.base[...] = model + share * (parameters.flat - state.base)
                parameters.flat[...], state.base[...] = state.base, model
        models: list[Array] = []
        if self.delay_compensation:
            latest = parameters.flat if state.arrived is None else state.arrived
            models = [parameters.flat, latest] if self.pipeline else [latest]
        client.in_turn(lambda: state.served.put_back(client, models, comm))

    def weight(self, state: DataParallelASGDState) -> int:
        return 1 if state.base is None else state.gathered_samples

    def report(self, state: DataParallelASGDState) -> dict[str, Any] | None:
        """This worker's statistics; after `finish` those of all, and what they sum up to."""
        if self.serves(state):
            return None
        own = state.connection.group.own.rank
        found = state.table or [state.client.statistics]
        names = range(len(found)) if state.table else [own]
        rows = [{"worker": k, **each.as_dict()} for k, each in zip(names, found, strict=True)]
        return {"workers": rows}

    def tables_of(self, state: DataParallelASGDState) -> Mapping[str, RemoteTable]:
        return state.tables

    def write_elsewhere(self, state: DataParallelASGDState, folder: str) -> dict[str, Any]:
        return state.connection.write_tables(folder)

    def read_elsewhere(self, state: DataParallelASGDState, folder: str) -> None:
        state.connection.load_tables(folder)

    def bytes_sent(self, state: DataParallelASGDState) -> int:
        if self.serves(state):
            return 0
        counted = state.client.statistics
        return counted.bytes_sent + counted.bytes_received
