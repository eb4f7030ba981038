"""Rows of an embedding table, pulled and pushed: the table alone, and a server with workers.

Ids are random over 10**11, and drawn from the table's ids, in a new order. The limits: as many rows
read and written at random in a large array, and a bare loop of MPI with the same bytes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd import SGD, Communicator, DataParallelASGD, Learner, Parameters
from parallel_sgd.communication.mpi.init_timeout import kill_if_longer_than
from parallel_sgd.embedding import Embedding
from parallel_sgd.embedding.rows import RowTable

from ..timing import median_s
from .bare import Exchange, bare_server, bare_worker, quiet_barrier, rate

Array = npt.NDArray[Any]

WORKERS = 2
WIDTH = 16
ROW = 4 * WIDTH  #: bytes of its values
ID, HEADER = 8, 128
DIFFERENT = 10**11
MOST_BATCHES = 50
KINDS = ("pull", "push", "both")
TABLE = Embedding(name="rows", width=WIDTH)


def measure(
    comm: Communicator, touched: int, batch: int, rounds: int, seconds: float
) -> dict[str, Any]:
    """Measure on all ranks: two workers and a server.

    Returns:
        "random": rows a second read and written in this memory; "table": rows of a `RowTable`
        in the same process; "served", "bare": rows a second of all workers, by
        their number and "pull", "push" or "both" (each row pulled and pushed), medians over the
        rounds; "bytes": of the server's table, a row.
    """
    limit = 300 + touched / 1e5 + 5 * 20 * (rounds + 1) * (seconds + 1)
    with kill_if_longer_than(limit, comm.rank, "the benchmark of rows"):
        own: dict[str, Any] = {}
        if comm.rank == WORKERS:
            own["random"] = _random_access(touched, batch, rounds)
            own["table"] = _table(touched, batch, rounds)
        quiet_barrier()
        own["bare"] = _medians(rounds, lambda count, kind: _bare(comm, count, kind, batch, seconds))
        served, nbytes = _served(comm, touched, batch, rounds, seconds)
        everyone = comm.allgather_object(own | {"served": served, "bytes": nbytes})
    rates = {
        name: {case: sum(rank[name][case] for rank in everyone[:WORKERS]) for case in own["bare"]}
        for name in ("bare", "served")
    }
    rows = {name: rate * batch for name, rate in rates["bare"].items()}
    return {
        **everyone[WORKERS],
        "bare": rows,
        "served": {name: rate * batch for name, rate in rates["served"].items()},
        "bytes": everyone[0]["bytes"],
    }


def all_ids(touched: int) -> Array:
    """Return the ids of the table, in the order of arrival: the same on every rank."""
    ids = np.unique(np.random.default_rng(0).integers(DIFFERENT, size=touched))
    return np.random.default_rng(1).permutation(ids)


def random_batches(ids: Array, batch: int, seed: int) -> Iterator[Array]:
    """Yield minibatches of ids in a new order, again and again: all different, but for chance."""
    order = np.random.default_rng(seed).permutation(len(ids))[: MOST_BATCHES * batch]
    return cycle([ids[some] for some in np.split(order, range(batch, len(order), batch))][:-1])


def _speed(call: Callable[[Array], object], batches: Iterator[Array], rounds: int) -> float:
    """Return rows a second: the median over minibatches, of equal length."""
    size = len(next(batches))
    return size / median_s(lambda: call(next(batches)), 10 * rounds)


def _random_access(touched: int, batch: int, rounds: int) -> dict[str, float]:
    """Return rows a second of NumPy in a large array, read or changed."""
    memory, out = (np.ones((n, WIDTH), np.float32) for n in (touched, batch))
    batches = random_batches(np.arange(touched), batch, seed=1)

    def read(rows: Array) -> None:
        np.take(memory, rows, axis=0, out=out, mode="clip")

    def change(rows: Array) -> None:
        read(rows)
        memory[rows] = np.add(out, 1, out=out)

    return {"pull": _speed(read, batches, rounds), "push": _speed(change, batches, rounds)}


def _table(touched: int, batch: int, rounds: int) -> dict[str, float]:
    """Return rows a second of a table without a server."""
    ids, gradient, table = (
        all_ids(touched),
        np.full((batch, WIDTH), 1e-3, np.float32),
        RowTable(TABLE),
    )
    for first in range(0, len(ids), batch):
        some = ids[first : first + batch]
        table.push(some, gradient[: len(some)], 1)
    out, batches = np.empty_like(gradient), random_batches(ids, batch, seed=1)
    return {
        "pull": _speed(lambda ids: table.pull(ids, out), batches, rounds),
        "push": _speed(lambda ids: table.push(ids, gradient, 1), batches, rounds),
    }


def _medians(rounds: int, case: Callable[[int, str], float]) -> dict[str, float]:
    """This rank's rates by "workers kind", interleaved over the rounds."""
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for count in range(1, WORKERS + 1):
            for kind in KINDS:
                rates[f"{count} {kind}"].append(case(count, kind))
    return {name: statistics.median(of_case) for name, of_case in rates.items()}


def _bare(comm: Communicator, count: int, kind: str, batch: int, seconds: float) -> float:
    exchanges = []
    if kind != "push":
        exchanges.append(Exchange(ID * batch, ROW * batch))
    if kind != "pull":
        exchanges.append(Exchange((ID + ROW) * batch, HEADER))
    quiet_barrier()
    active = comm.split(int(comm.rank < count))
    if comm.rank < count:
        return bare_worker(active, WORKERS, exchanges, seconds)
    if comm.rank == WORKERS:
        bare_server(count, exchanges)
    return 0.0


def _served(
    comm: Communicator, touched: int, batch: int, rounds: int, seconds: float
) -> tuple[dict[str, float], float]:
    """A worker's minibatches a second, and the server's bytes a row."""
    from mpi4py import MPI

    model = Parameters({"w": np.zeros(1, np.float32)})
    algorithm = DataParallelASGD(servers=1, sync_steps=1, tables=(TABLE,))
    learner = Learner(model, SGD(lr=0.1), algorithm, comm)
    among = MPI.COMM_WORLD.Split(int(learner.serves), comm.rank)
    if learner.serves:
        learner.finish()
        return {}, 0.0
    table, ids = learner.tables[TABLE.name], all_ids(touched)
    gradient = np.full((batch, WIDTH), 1e-3, np.float32)
    for first in range(comm.rank * batch, len(ids), WORKERS * batch):
        some = ids[first : first + batch]
        table.push(some, gradient[: len(some)], 1)
    batches = random_batches(ids, batch, seed=1 + comm.rank)

    def step(kind: str) -> None:
        some = next(batches)
        if kind != "push":
            table.rows(some)
        if kind != "pull":
            table.push(some, gradient, 1)

    def case(count: int, kind: str) -> float:
        quiet_barrier(among)
        active = learner.comm.split(int(comm.rank < count))
        return rate(active, partial(step, kind), seconds) if comm.rank < count else 0.0

    served = _medians(rounds, case)
    quiet_barrier(among)
    counts = table.counts()
    learner.finish()
    return served, counts["bytes"] / counts["rows"]
