"""Server failover: after rank failures, training with parameter servers continues without rollback.

Each worker keeps its state, and continues from its position in the data, dealt out among the
remaining workers. The servers' shards are reassembled, and placed anew on the remaining servers
(`parameter_server.shards`). A pending push is repeated for values that have not arrived. Ranks that
join become servers; if no server is left, each worker also serves a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ...communication import retry
from ...communication.stderr import write_stderr
from ...errors import PeerFailure, RanksLost, SharedPeerFailure
from ...kernels import array_module, on_host
from ...parameter_server import Assembled, WorkerProgress, assemble
from ...parameter_server.statistics import unpacked_statistics
from ...state import Cause
from .base import Reconfiguring
from .rank_shards import RankShards, ServedLearner, require_rows, resume_client
from .recovery_status import RecoveryStatus, ServedLosses, largest

Result = TypeVar("Result")


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
        self._shards = RankShards(learner)
        self._model: Any = None  # [n], this rank's model during a recovery
        self._completed, self._began, self._leader, self._total = False, True, 0, 0
        self._is_set_up = False  # True: this rank's part of the servers is recorded
        self._calls = 0  # calls of `_retry` completed on this worker
        self._most_calls = 0  # the most calls completed on any worker
        self._in_retry = False  # True within a call that all workers rerun
        self._before: Any = None  # algorithm state and bytes sent, before the failure
        self.losses = ServedLosses()

    def begin(self) -> None:
        self._generation = self._learner.world.generation
        if self._generation:  # this rank joins a job that has trained already
            if not self._learner.serves:  # a new worker's client knows no servers
                self._shards.generation = -1
            self._rejoin()
            self._resume()
        else:
            self._shards.record(self._generation)
            self._is_set_up = True
            self._learner.world.barrier()  # a rank past this point knows that all are set up
        self._learner.state.set_retry(self._retry_request)

    @property
    def common_progress(self) -> int:
        return self._calls  # each worker is at a step of its own

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
        learn this during recovery, and do not rerun the function. Nor does a worker rerun a whole
        training that has come to its end: the servers have ended with it. Collective.
        """
        results: list[Result] = []

        def attempt() -> Result:
            is_over = results and self._completed and not meets
            if not is_over and (not results or self._most_calls <= self._calls):
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
            if self._completed:  # by a recovery: ranks past the barrier do not come again
                return
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
        known = self._shards.generation >= 0
        progress = None
        if known and not learner.serves and not self._completed:
            client = state.client
            pushing = client.pending_push
            progress = WorkerProgress(
                rank=world.world_ranks[world.rank],
                generation=self._shards.generation,
                versions=client.versions,
                clock=client.clock if pushing is None else pushing.clock - 1,
                samples=client.samples,
            )
        statistics = state.table
        return RecoveryStatus(
            started=learner.started,
            is_set_up=self._is_set_up,
            completed=self._completed,
            progress=progress,
            samples=learner.samples,
            total=state.minibatch.total if state.minibatch else learner.last_samples,
            began=state.began and not learner.serves,
            losses=self.losses if known else None,
            workers=list(self._shards.workers),
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
        first = min(status.started for status in statuses)
        if any(status.started == first and not status.is_set_up for status in statuses):
            self._shards.kept.clear()  # no rank has trained
            progress = [None] * len(statuses)
        knows = progress[world.rank] is not None
        latest = state.pulled if knows else x
        copy = own if latest is x else on_host(latest)
        whole = assemble(world, self._shards.kept, progress, copy, state.buffers)
        begins = not whole.held and not any(progress)
        if begins:
            whole.vectors[0][...] = own
        else:
            require_rows(learner, whole)
        workers = [
            progress[rank] or WorkerProgress(world.world_ranks[rank], -1, [], 0, 0)
            for rank in learner.group.workers
        ]
        tables = self._shards.tables()
        state.connection.resume_from(whole.vectors, whole.counters(workers), tables)
        own = own if knows else whole.vectors[0]
        x[...] = array_module(x).asarray(own)
        if not learner.serves:
            resume_client(learner, whole, workers)
        if not begins:
            self._count_losses(whole, min((s.workers for s in statuses if s.workers), key=len))
        self._shards.record(self._generation)
        self._is_set_up = True
        world.barrier()  # a rank past this point knows that all have recorded theirs
        del self._shards.kept[:-1]
        self._model = None
        here = [s.total for s in statuses if s.samples - s.total == learner.samples]
        self._total = 0 if learner.algorithm.asynchronous else max(here, default=0)
        # No worker begins with servers before all have completed the warm start.
        self._began = any(status.began for status in statuses)
        self._leader = max(
            range(len(workers)), key=lambda k: statuses[learner.group.workers[k]].samples
        )
        learner.state_replaced(Cause.RECOVERED)
        if not begins:
            self._print(whole)

    def _resume(self) -> None:
        """Complete this worker's interrupted work. Collective over the workers."""
        learner = self._learner
        if learner.serves or self._completed:
            return
        state, work = learner.state, learner.runner.work
        if self._began:
            state.began = True
        else:  # in the warm start: the workers differ by the last step at most
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
        world.barrier()  # as in `finish`

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
