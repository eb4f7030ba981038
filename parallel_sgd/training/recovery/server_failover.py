"""Server failover: after rank failures, training with parameter servers continues without rollback.

Each worker keeps its state, and continues from its position in the data, dealt out among the
remaining workers. The servers' shards are reassembled, and placed anew on the remaining servers
(`parameter_server.shards`). A pending push is repeated for values that have not arrived. Ranks that
join become servers; if no server is left, each worker also serves a part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ...algorithms.asynchronous import DataParallelASGD
from ...algorithms.asynchronous_state import DataParallelASGDState
from ...communication import RanksChanged, retry
from ...communication.stderr import write_stderr
from ...errors import PeerFailure, RanksLost, SharedPeerFailure
from ...kernels import array_module, on_host
from ...optimizers import LocalStep
from ...parameter_server import Assembled, Shard, WorkerProgress, assemble
from ...parameter_server.roles import ServerGroup
from ...parameter_server.statistics import unpacked_statistics
from ...state import Cause
from ..consistency import ConsistencyCheck
from ..minibatch_ledger import MinibatchLedger
from .base import Reconfiguring, Recoverable
from .recovery_status import RecoveryStatus, ServedLosses, largest

Result = TypeVar("Result")


class ServedLearner(Recoverable, Protocol):
    """The interface of a `Learner` with parameter servers for a failover."""

    group: ServerGroup
    algorithm: DataParallelASGD
    state: DataParallelASGDState
    local_step: LocalStep
    bytes_sent: int
    last_samples: int
    consistency: ConsistencyCheck
    ledger: MinibatchLedger

    @property
    def serves(self) -> bool: ...

    def announce(self, samples: int, total: int) -> None: ...


class ServerFailover(Reconfiguring):
    """Lets each worker of parameter servers continue from its present state.

    Args:
        learner, set_up: see `Reconfiguring`.

    Attributes:
        losses: so far.

    Memory: another copy of the pulled model, and with error feedback two copies of the residual.
    Cost: these copies for each push.
    """

    def __init__(self, learner: ServedLearner, set_up: Callable[[], None]) -> None:
        super().__init__(learner, set_up)
        self._learner: ServedLearner
        self._served = -1  # latest generation of servers with this rank
        self._workers: tuple[int, ...] = ()  # of that generation, by original world rank
        self._shards: list[Shard] = []  # the newest last
        self._model: Any = None  # [n], this rank's model during a recovery
        self._completed, self._began, self._leader, self._total = False, True, 0, 0
        self._calls = 0  # calls of `_retry` completed on this worker
        self._most_calls = 0  # the most calls completed on any worker
        self._in_retry = False  # True within a call that all workers rerun
        self._before: Any = None  # algorithm state and bytes sent, before the failure
        self.losses = ServedLosses()

    def begin(self) -> None:
        self._generation = self._learner.world.generation
        if self._generation:  # this rank joins a job that has trained already
            if not self._learner.serves:  # a new worker's client knows no servers
                self._served = -1
            self._rejoin()
            self._resume()
        else:
            self._record_shard()
        self._learner.state.set_retry(self._retry_request)

    # Verbs.

    def collective(self, function: Callable[[], Result]) -> Result:
        """Run a function without steps, and rerun it after a failure, until all workers have
        completed it.

        A nested call runs once, as a part of the outer call: after a failure the outer call is
        rerun.
        """
        if self._in_retry:
            return function()

        def marked() -> Result:
            self._in_retry = True
            try:
                return function()
            finally:
                self._in_retry = False

        return self._retry(marked, meets=True)

    def commit_after(self, function: Callable[[], Result]) -> Result:
        return self.collective(function)

    def attempt(self, call: Callable[[], object]) -> bool:
        self.collective(call)
        return True

    def run(self, function: Callable[[], Result]) -> Result:
        """Run a function that trains, and rerun it after every rank failure outside of steps.

        Raises:
            PeerFailure: in a session, because its workers are at different points.
        """

        def called() -> Result:
            try:
                return function()
            except RanksChanged:
                self._calls += 1
                raise
            except Exception as error:
                self._require_recoverable(error)
                if not self.in_session:
                    raise
                raise PeerFailure(
                    "a rank has failed in a collective of the program, within a session with "
                    "servers: call the collective by learner.between_steps, or restart from a "
                    "checkpoint (parallel-sgd run --restarts)"
                ) from error

        return self._retry(called, meets=False)

    def _retry(self, function: Callable[[], Result], *, meets: bool) -> Result:
        """Run a function, and rerun it after every rank failure.

        Args:
            meets: the workers meet afterwards (outside of a session always).

        A failure may occur while only some workers have passed the meeting. The remaining workers
        learn this during recovery, and do not rerun the function. Collective.
        """
        results: list[Result] = []

        def attempt() -> Result:
            if not results or self._most_calls <= self._calls:
                results.clear()
                results.append(function())
                if (meets or not self.in_session) and not self._learner.serves:
                    self._meet()  # a worker past this point knows that all are here
                self._calls += 1
            else:
                self._calls = self._most_calls
            return results[0]

        return retry(self._learner.world, attempt, self.recover)

    def _meet(self) -> None:
        if self._completed:  # the servers have ended
            self._learner.comm.barrier()
        else:
            self._learner.consistency.meet(self._learner.comm)

    def _retry_request(self, request: Callable[[], Result]) -> Result:
        """Run a request for rows, and repeat the request after every rank failure.

        A request within a call that all workers rerun runs once, as a part of that call.
        """
        return request() if self._in_retry else retry(self._learner.world, request, self.recover)

    def step(self, take: Callable[[int], object], samples: int) -> bool:
        """Take a step. Return False if ranks have failed in the step before any training."""
        learner = self._learner
        before = learner.samples
        try:
            if learner.world.generation != self._generation:
                raise RanksLost("the ranks have changed")
            total, self._total = self._total, 0
            if total and not learner.ledger.is_fed:  # other workers need its push
                learner.announce(samples, total)
            take(samples)
            learner.world.fruitless = 0
            return True
        except Exception as error:
            self._require_recoverable(error)
            minibatch = learner.state.minibatch
            self.recover()
            if minibatch is not None:
                learner.last_samples = minibatch.total
                return True
            if learner.samples > before:  # in the warm start: a worker has taken this step
                learner.last_samples = learner.samples - before
                return True
            return bool(self._total) and not learner.ledger.is_fed and self.step(take, samples)

    def finish(self, complete: Callable[[], object]) -> None:
        world = self._learner.world

        def attempt() -> None:
            if not self._completed:
                complete()
                self._completed = True
            world.barrier()  # a rank past this point knows that all hold the model

        try:
            retry(world, attempt, lambda: self.recover(allow_join=self._learner.serves))
        except SharedPeerFailure:  # no worker is left
            if not self._completed:
                raise

    # Recovery.

    def recover(self, *, allow_join: bool = True) -> None:
        learner = self._learner
        self._keep_model()
        allow_join = allow_join and not (
            learner.algorithm.tables or learner.group.shared or self._completed
        )
        self._before = learner.state, learner.bytes_sent
        super().recover(allow_join=allow_join)

    def _continue(self, *, allow_join: bool) -> None:
        learner, (state, sent) = self._learner, self._before
        self._keep_model()
        self._reconfigure(allow_join=allow_join)
        state.rebind(learner.state)
        state.set_retry(self._retry_request)
        learner.state = learner.runner.state = state
        learner.bytes_sent = sent  # counted by the state as well as by the learner
        self._rejoin()
        self._resume()

    def _keep_model(self) -> None:
        if self._model is None:
            self._model = self._own_model()

    def _losses(self) -> dict[str, int]:
        return {
            "samples_trained_again": 0,
            "residual_values_lost": self.losses.residuals,
            "server_values_lost": self.losses.model,
            "optimizer_values_lost": self.losses.optimizer,
        }

    def _own_model(self) -> Any:
        return on_host(self._learner.parameters.flat.copy())

    def _status(self) -> RecoveryStatus:
        learner, state, world = self._learner, self._learner.state, self._learner.world
        known = self._served >= 0
        progress = None
        if known and not learner.serves and not self._completed:
            client = state.client
            pushing = client.pending_push
            progress = WorkerProgress(
                rank=world.world_ranks[world.rank],
                generation=self._served,
                versions=client.versions,
                clock=client.clock if pushing is None else pushing.clock - 1,
                samples=client.samples,
            )
        statistics = state.table
        return RecoveryStatus(
            completed=self._completed,
            progress=progress,
            samples=learner.samples,
            total=state.minibatch.total if state.minibatch else learner.last_samples,
            began=state.began or learner.serves,
            losses=self.losses if known else None,
            workers=list(self._workers),
            calls=self._calls,
            statistics=statistics and [its.packed() for its in statistics],
        )

    def _rejoin(self) -> None:
        """Reassemble the model from all ranks' parts, and restart the servers with it.
        Collective."""
        learner, world = self._learner, self._learner.world
        statuses: list[RecoveryStatus] = world.allgather_object(self._status())
        self.losses = largest([s.losses for s in statuses if s.losses] or [self.losses])
        self._most_calls = max(statuses[rank].calls for rank in learner.group.workers)
        if any(status.completed for status in statuses):
            self._take_final(statuses)
            return
        x, state = learner.parameters.flat, learner.state
        own = self._own_model() if self._model is None else self._model
        progress = [status.progress for status in statuses]
        knows = progress[world.rank] is not None
        latest = state.pulled if knows else x
        copy = own if latest is x else on_host(latest)
        whole = assemble(world, self._shards, progress, copy, state.buffers)
        begins = not whole.held and not any(progress)
        if begins:
            whole.vectors[0][...] = own
        else:
            self._require_rows(whole)
        workers = [
            progress[rank] or WorkerProgress(world.world_ranks[rank], -1, [], 0, 0)
            for rank in learner.group.workers
        ]
        tables = self._tables()
        state.connection.resume_from(whole.vectors, whole.counters(workers), tables)
        own = own if knows else whole.vectors[0]
        x[...] = array_module(x).asarray(own)
        if not learner.serves:
            self._resume_client(whole, workers)
        if not begins:
            self._count_losses(whole, min((s.workers for s in statuses if s.workers), key=len))
        self._record_shard()
        world.barrier()  # a rank past this point knows that all have recorded theirs
        self._shards, self._model = self._shards[-1:], None
        here = [s.total for s in statuses if s.samples - s.total == learner.samples]
        self._total = 0 if learner.algorithm.asynchronous else max(here, default=0)
        self._began = all(status.began for status in statuses)
        self._leader = max(
            range(len(workers)), key=lambda k: statuses[learner.group.workers[k]].samples
        )
        learner.state_replaced(Cause.RECOVERED)
        if not begins:
            self._print(whole)

    def _resume_client(self, whole: Assembled, workers: list[WorkerProgress]) -> None:
        """Set this worker's client to the versions and clocks of the new servers."""
        learner, state = self._learner, self._learner.state
        progress, client = workers[learner.comm.rank], state.client
        pending = client.pending_push
        if pending is not None:
            pending.record_failure(
                self._arrived(whole, workers, progress, pending.clock), whole.missing
            )
        client.clock, client.samples = progress.clock, whole.samples
        client.versions = [max(0, whole.version - whole.lag(progress))] * client.servers
        if state.base is not None and progress.generation < 0:
            state.base[...] = self._learner.parameters.flat

    def _arrived(
        self, whole: Assembled, workers: list[WorkerProgress], own: WorkerProgress, clock: int
    ) -> npt.NDArray[np.bool_]:
        """Return a mask [n]: values of this worker's push, given by its clock, present on the
        remaining servers."""
        arrived = np.zeros(whole.missing.size, bool)
        if not self._learner.algorithm.asynchronous and clock <= max(w.clock for w in workers):
            arrived[:] = True  # a worker has the answer: its pulled model includes the round
            return arrived
        for facts in whole.held:
            if facts.generation == own.generation and facts.clocks.get(own.rank, -1) >= clock:
                for start, stop in facts.runs:
                    arrived[start:stop] = True
        return arrived & ~whole.missing

    def _resume(self) -> None:
        """Complete this worker's interrupted work. Collective over the workers."""
        learner = self._learner
        if learner.serves or self._completed:
            return
        state, work = learner.state, learner.runner.work
        if not self._began:  # the workers differ by the last step at most
            step, comm = learner.local_step.state, learner.comm
            for array in (learner.parameters.flat, *step.buffers.values()):
                comm.broadcast(array, self._leader)
            counts = comm.allgather_object((step.steps, step.samples))
            step.steps, step.samples = counts[self._leader]
            if not state.in_warm_start:
                state.start_servers()
        learner.algorithm.resume(state, work)

    def _take_final(self, statuses: list[RecoveryStatus]) -> None:
        """Broadcast the final model from a rank that has completed it. Collective."""
        learner, world = self._learner, self._learner.world
        root = next(rank for rank, status in enumerate(statuses) if status.completed)
        x, state = learner.parameters.flat, learner.state
        final = self._own_model() if self._model is None else self._model
        world.broadcast(final, root)
        x[...] = array_module(x).asarray(final)
        if not self._completed:
            tables = (status.statistics for status in statuses if status.completed)
            table = next(filter(None, tables), None)
            state.end_without_servers(table and [unpacked_statistics(its) for its in table])
        state.connection.end_without_servers()
        self._completed, self._model = True, None

    def _record_shard(self) -> None:
        """Record the part of the model served by this rank from now on."""
        learner, world = self._learner, self._learner.world
        connection, group = learner.state.connection, learner.group
        ranks = world.world_ranks
        self._served, self._workers = self._generation, tuple(ranks[k] for k in group.workers)
        if connection.serves:
            server = connection.server
            self._shards.append(
                Shard(
                    self._generation,
                    group.server,
                    len(group.servers),
                    connection.runs,
                    self._workers,
                    server.model,
                    server.tables,
                    self._workers,
                )
            )

    def _require_rows(self, whole: Assembled) -> None:
        """Refuse to continue if rows of tables are lost, or would have to move. Local, the same on
        all ranks."""
        learner = self._learner
        if not learner.algorithm.tables:
            return
        servers = len(learner.group.servers)
        had = Counter((facts.generation, facts.servers) for facts in whole.held)
        if not any(count == of == servers for (_, of), count in had.items()):
            raise SharedPeerFailure(
                "a server has failed, and its rows of the tables are lost: run with checkpoints "
                "and `parallel-sgd run --restarts`, which continues from the newest checkpoint"
            )

    def _tables(self) -> Any:
        """Return this rank's served tables, renumbered for the present workers; None on a new
        server."""
        if not self._shards:
            return None
        ranks, held = self._learner.world.world_ranks, self._shards[-1]
        now = [ranks[k] for k in self._learner.group.workers]
        held.tables.renumber(
            {k: now.index(rank) for k, rank in enumerate(held.pushers) if rank in now}
        )
        held.pushers = tuple(now)
        return held.tables

    def _count_losses(self, whole: Assembled, workers: list[int]) -> None:
        learner, losses = self._learner, self.losses
        failed = set(workers) - set(learner.world.world_ranks)
        size = learner.parameters.flat.size
        losses.residuals += size * len(failed) * (not learner.algorithm.rules.lossless)
        losses.model += whole.lost
        losses.optimizer += whole.lost * learner.state.buffers

    def _print(self, whole: Assembled) -> None:
        learner, world = self._learner, self._learner.world
        if world.rank == 0:
            failed, group = ", ".join(map(str, world.failed_ranks)) or "none", learner.group
            values = f"; {whole.lost} server values come from a worker" if whole.lost else ""
            write_stderr(
                f"parallel_sgd: failed ranks: {failed}; workers: {len(group.workers)}; "
                f"servers: {len(group.servers)}{values}"
            )
