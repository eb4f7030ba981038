"""The state of a worker in asynchronous SGD, including the servers' state for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from ..communication import Communicator, InBackground
from ..compression import registered_bits
from ..costs import Measured
from ..embedding import Table, check_tables
from ..errors import DivergedError, NotFinite, SharedError, SharedProblem, UserError
from ..exchange import Exchange
from ..parameter_server import (
    Client,
    Connection,
    Kind,
    RemoteTables,
    Retry,
    Rules,
    ServedState,
    ServerGroup,
    WorkerStatistics,
    load_tables,
    write_tables,
)
from ..state import External, across, workspace
from ..validation import shown
from .algorithm import Array, Minibatch, Work
from .ramp import Ramp

PERIOD = "minibatches in the worker's period"
"""Name of the number compared between the ranks of a worker."""

NO_NUMBER = -1
"""In place of a worker's number if every worker is a single rank."""


@dataclass(kw_only=True)
class DataParallelASGDState(External):
    """The state of a worker.

    Attributes:
        base: [n], the model before the local steps, if model updates are pushed; else None.
        gathered: [n], the gradients summed since the last push, if there are several; else None.
        gathered_samples: of this worker since its last push.
        period_samples, period_steps: since the last push, of all workers as far as this worker
            knows.
        minibatches: of this worker so far: the ramp's clock.
        residual: float32 [n], the quantization error of pushes; None in full precision.
        bits: of pushes, chosen by ``gradient_bits="auto"``.
        arrived: [n], the model received or expected by a push in the background; None without such
            a push.
        worker: number of this rank's worker if workers have several ranks; else `NO_NUMBER`.
        served: the servers' state, for checkpoints.
        work, rules, ramp, declared, distributed_after: the algorithm's work and options.
        connection: this rank's client or server.
        tables: this worker's side of the tables.
        measured: the measurement behind `bits`; None after loading a checkpoint.
        sending: the push under way, in the background.
        sent, incoming: [n], the vector of this push, and the memory for its model.
        since, blocked: end of this worker's latest exchange, and the total time in exchanges by
            then, in seconds.
        table: the statistics of all workers, once this worker has left.
        minibatch: of the step under way.
        exchanging: arguments of the exchange under way.
        began: True once servers have started from the result of the warm start.
        local_sum: the exchange within this rank's worker; None if every worker is a single rank.
    """

    base: Array | None = across("mean", default=None)
    gathered: Array | None = across("sum", default=None)
    gathered_samples: int = across("sum", least=0, default=0)
    period_samples: int = across("same", least=0, default=0)
    period_steps: int = across("same", least=0, default=0)
    minibatches: int = across("most", least=0, default=0)
    residual: Array | None = across("sum", default=None)
    bits: float | None = across("same", default=None)
    arrived: Array | None = across("same", default=None)
    worker: int = across("most", least=NO_NUMBER, default=NO_NUMBER)
    served: ServedState = field(default_factory=ServedState)
    work: Work = workspace()
    rules: Rules = workspace()
    ramp: Ramp = workspace()
    declared: tuple[Table, ...] = workspace()
    distributed_after: int = workspace()
    connection: Connection = workspace()
    tables: RemoteTables = workspace()
    measured: Measured | None = workspace(default=None)
    sending: InBackground[None] | None = workspace(default=None)
    sent: Array | None = workspace(default=None)
    incoming: Array | None = workspace(default=None)
    since: float = workspace(default=0.0)
    blocked: float = workspace(default=0.0)
    table: list[WorkerStatistics] | None = workspace(default=None)
    minibatch: Minibatch | None = workspace(default=None)
    exchanging: tuple[Array, float, int] | None = workspace(default=None)
    began: bool = workspace(default=True)
    local_sum: Exchange | None = workspace(default=None)

    @property
    def group(self) -> ServerGroup:
        """The workers and the servers."""
        return self.connection.group

    @property
    def client(self) -> Client:
        """This worker's client."""
        return self.connection.client

    @property
    def weight(self) -> int:
        """Weight of this rank's model in a mean of the ranks' models: as in the servers' model."""
        return self.gathered_samples if self.weighs_by_samples and self.base is not None else 1

    @property
    def weighs_by_samples(self) -> bool:
        """True if the servers weight model updates by their samples."""
        return self.rules.mode == "sync" and self.rules.merge == "mean"

    @property
    def in_warm_start(self) -> bool:
        """True while every worker trains on the whole of each minibatch."""
        return self.work.samples < self.distributed_after

    def start_servers(self) -> None:
        """Start the servers from the workers' common model and optimizer state. Collective.

        The optimizer's state is sent only if servers take its steps.
        """
        self._set_initial_state()
        self._restore_servers()
        self.began = True

    def _set_initial_state(self) -> None:
        """Set the servers' state from worker 0's model and optimizer."""
        client, work = self.client, self.work
        if self.base is not None:
            self.base[...] = work.parameters.flat
        x, own = work.parameters.flat, work.optimizer.state
        self.served.start_from(x, own, self.buffers, client.servers, self.group)

    def bits_after(self, samples: int) -> float:
        """Return the bits of a push after `samples` samples on this worker's clock."""
        bits = self.rules.bits_after(samples) if self.bits is None else self.bits
        return cast(float, bits)

    def gather(self, gradient: Array) -> Array:
        """Add to the summed gradients of a period with several minibatches, and return the sum."""
        if self.gathered is None:
            self.gathered = gradient.copy()
        else:
            self.gathered += gradient
        return self.gathered

    def sum_within(self, vector: Array, samples: int) -> int:
        """Replace `vector` [n] by its sum over the ranks of this worker, and return the sum of
        `samples`. Collective over these ranks; with a single rank nothing changes.

        Raises:
            SharedError: as `ServerGroup.sum_within`, before any change.
        """
        if self.local_sum is None:
            return samples
        total = self.group.sum_within(samples, Kind.PUSH, equal={PERIOD: self.period_steps})
        with self.client.waiting_within():
            self.local_sum.sum(vector)
        return total

    def problem_within(self, own: str | None, of_sum: str | None) -> str | None:
        """Return the problems of this worker's ranks in one line that names these ranks; a
        `NotFinite` if all problems are. Collective over these ranks.

        Args:
            own: problem of this rank's gradient or loss, before the sum.
            of_sum: problem of the values summed over the ranks, if no rank has a problem before.
        """
        within = self.group.within
        assert within is not None
        problems = [own, of_sum]
        for problem, count in zip(problems, _counted(problems, within), strict=True):
            if count:
                try:
                    within.raise_together(problem)
                except DivergedError as error:
                    return NotFinite(error)
                except SharedError as error:
                    return SharedProblem(error)
        return None

    def leave(self) -> None:
        """Announce the last push, wait for all workers to do so, and take the final model."""
        self.wait()
        x, client = self.work.parameters.flat, self.client
        statistics = client.statistics
        statistics.bytes_within = self.group.sum_within(self.bytes_within, Kind.LEAVE)
        client.count_waiting_within()
        self.table = client.in_order(lambda: client.leave(out=x))
        self.connection.end()
        if self.base is not None:
            self.base[...] = x
        self.arrived = None

    @property
    def bytes_sent(self) -> int:
        if self.connection.group.serves:
            return 0
        counted = self.client.statistics
        return counted.bytes_sent + counted.bytes_received + self.bytes_within

    @property
    def bytes_within(self) -> int:
        """Bytes that this rank has sent to other ranks of its worker so far."""
        if self.local_sum is None:
            return 0
        return self.local_sum.bytes_sent + self.client.bytes_relayed

    def report(self) -> dict[str, Any] | None:
        """Return this worker's statistics, or those of all workers after `leave`."""
        if self.connection.group.serves:
            return None
        if self.table:
            workers = dict(enumerate(self.table))
        else:
            own = replace(self.client.statistics, bytes_within=self.bytes_within)
            workers = {self.group.worker: own}
        report: dict[str, Any] = {
            "workers": [{"worker": k, **its.as_dict()} for k, its in workers.items()]
        }
        if self.bits is not None:
            report["gradient_bits"] = self.bits
            report |= self.measured.as_dict() if self.measured else {}
        return report

    def wait(self) -> None:
        sending, self.sending = self.sending, None
        if sending is not None:
            with self.work.comm.trace.span("wait"):
                sending.result()

    def abandon(self) -> None:
        sending, self.sending = self.sending, None
        if sending is not None:
            sending.error()
        self.connection.abandon()

    @property
    def pulled(self) -> Array:
        """The newest model pulled by this worker, [n]."""
        if self.arrived is not None and self.client.pending_push is None:
            return self.arrived
        return self.work.parameters.flat if self.base is None else self.base

    @property
    def buffers(self) -> int:
        """Number of buffers of the servers' optimizer."""
        pushes_updates = self.rules.pushes_updates
        return 0 if pushes_updates else len(self.work.optimizer.state.buffers)

    def rebind(self, other: DataParallelASGDState) -> None:
        """Continue with the work and the connection of `other`, a new state on the remaining ranks.

        The new client receives the counters of the previous client.
        """
        if not self.connection.group.serves:
            old, new = self.client, other.client
            new.pending_push, new.statistics = old.pending_push, old.statistics
            new.clock, new.row_clock, new.blocked_s = old.clock, old.row_clock, old.blocked_s
            new.versions, new.samples, new.factor = old.versions, old.samples, old.factor
        self.work, self.connection = other.work, other.connection
        self.served.discard()

    def set_retry(self, retry: Retry) -> None:
        """Set the retry of all requests for rows: see `RemoteTable.rebind`."""
        serves = self.connection.group.serves
        for table in self.tables.values():
            table.rebind(None if serves else lambda: self.client, retry)

    def end_without_servers(self, statistics: list[WorkerStatistics] | None) -> None:
        """End after a failure: this rank's final model came from a rank that has finished.

        Args:
            statistics: of all workers.
        """
        self.table, self.arrived = statistics, None
        self.minibatch = self.exchanging = None
        if self.base is not None:
            self.base[...] = self.work.parameters.flat

    def close(self, *, failed: bool = False) -> None:
        if not failed:
            self.wait()
        if self.local_sum is not None:
            self.local_sum.close()
        self.connection.close(failed=failed)

    def check(self, saved: Mapping[str, Any], ranks: int) -> None:
        x = self.work.parameters.flat
        for name in ("gathered", "arrived"):
            array = saved[name]
            if array is not None and (array.shape, array.dtype) != (x.shape, x.dtype):
                raise UserError(f"has algorithm.{name}, which must be {x.dtype} [{x.size}]")
        if saved["bits"] not in (None, *registered_bits()):
            raise UserError(f"has bits={shown(saved['bits'])}, which no push can use")
        comm, workers = self.work.comm, ranks
        if max(saved["worker"], self.worker) != NO_NUMBER:
            workers = len(self.group.workers)
            if ranks != comm.size:
                raise UserError(
                    f"was saved by {ranks} ranks that train: with ranks_per_worker only as many "
                    f"ranks can continue, and here are {comm.size}"
                )
            if saved["worker"] != self.worker:
                raise UserError(
                    "was saved with other ranks in each worker: with ranks_per_worker the same "
                    "ranks must form a worker again"
                )
        ServedState.check(saved["served"], x, self.buffers, workers, first=comm.rank == 0)

    def collect(self) -> None:
        self.wait()
        if self.connection.finished:  # the servers have ended
            return
        if self.in_warm_start:
            self._set_initial_state()
            return
        client, x = self.client, self.work.parameters.flat
        self.group.sum_within(0, Kind.MEET)
        client.in_order(lambda: self.served.collect(client, x, self.buffers, self.group))

    def restored(self) -> None:
        x = self.work.parameters.flat
        self.minibatch = self.exchanging = self.measured = None
        self.began = not self.in_warm_start
        self.client.factor = self.ramp.factor(self.minibatches)
        for table in self.tables.values():
            table.discard_prefetched()
        if not self.served.fits(self.group):
            # Another number of workers: they restart from the servers' model.
            workers, model = self.served.reset_workers(self.group)
            self.arrived = None
            if self.base is None:
                x[...] = model
            else:  # keep the local updates since the last push, by their share
                self.base[...] = model + self._share(workers) * (x - self.base)
                x[...], self.base[...] = self.base, model
        self._restore_servers()

    def _share(self, workers: int) -> float:
        """Return this worker's share in the mean of the former workers' updates since their pushes.

        Only workers with samples push. The servers' model changes by as much as by all pushes of
        the former workers. Collective over the workers.
        """
        if self.weighs_by_samples:
            return 1.0
        comm, samples = self.work.comm, self.gathered_samples
        total = int(comm.sum_integers(np.array([samples]))[0])
        pushes = workers if self.rules.merge == "sum" else comm.size
        return pushes * samples / total if total else 0.0

    def _restore_servers(self) -> None:
        """Send the servers their state and backups."""
        client, models = self.client, self.next_models()
        client.in_order(lambda: self.served.restore(client, models, self.group))

    def next_models(self) -> list[Array]:
        """Return the models underlying this worker's next pushes, if servers need these models."""
        if not self.rules.delay_compensation:
            return []
        x = self.work.parameters.flat
        latest = x if self.arrived is None else self.arrived
        return [x, latest] if self.rules.pipeline else [latest]

    def write(self, folder: str) -> dict[str, Any]:
        return write_tables(self.client, folder) if self.tables else {}

    def check_files(self, folder: str) -> None:
        check_tables(self.declared, folder)

    def read(self, folder: str) -> None:
        if self.tables:
            load_tables(self.client, folder)


def _counted(problems: Sequence[str | None], comm: Communicator) -> list[int]:
    """Return on how many ranks each of these problems has occurred. Collective."""
    flags = np.array([problem is not None for problem in problems], np.int64)
    counts: list[int] = comm.sum_integers(flags).tolist()
    return counts
