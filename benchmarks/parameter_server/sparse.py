"""Rows of an embedding table, pulled and pushed by workers of a server, beside a bare loop of MPI
with as many bytes.

Ids are random over 10**11, and drawn from the table's ids, in a new order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from parallel_sgd import SGD, Communicator, DataParallelASGD, Learner, Parameters
from parallel_sgd.embedding import Embedding

from .bare import Array, bare, medians, ones, rate

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
        "served", "bare": rows a second of all workers, by their number and "pull", "push" or "both"
        (each row pulled and pushed), of medians over the rounds; "bytes": of the server's table, a
        row.
    """

    def peer(count: int, kind: str) -> float:
        pull, push = (ID * batch, ROW * batch), ((ID + ROW) * batch, HEADER)
        sizes = {"pull": [pull], "push": [push], "both": [pull, push]}[kind]
        exchanges = [(ones(sent), ones(answered)) for sent, answered in sizes]
        return bare(comm, count, WORKERS, exchanges, seconds)

    beside = medians(comm, _cases(peer), rounds)
    served, nbytes = _served(comm, touched, batch, rounds, seconds)
    rates = {"bare": beside, "served": served}
    rows = {
        of: {name: batch * sum(case) for name, case in cases.items()} for of, cases in rates.items()
    }
    return {**rows, "bytes": nbytes}


def all_ids(touched: int) -> Array:
    """Return the ids of the table, in the order of arrival: the same on every rank."""
    ids = np.unique(np.random.default_rng(0).integers(DIFFERENT, size=touched))
    return np.random.default_rng(1).permutation(ids)


def random_batches(ids: Array, batch: int, seed: int) -> Iterator[Array]:
    """Yield minibatches of ids in a new order, again and again: all different, but for chance."""
    order = np.random.default_rng(seed).permutation(len(ids))[: MOST_BATCHES * batch]
    return cycle([ids[some] for some in np.split(order, range(batch, len(order), batch))][:-1])


def _cases(case: Callable[[int, str], float]) -> dict[str, Callable[[], float]]:
    counts = range(1, WORKERS + 1)
    return {f"{count} {kind}": partial(case, count, kind) for count in counts for kind in KINDS}


def _served(
    comm: Communicator, touched: int, batch: int, rounds: int, seconds: float
) -> tuple[dict[str, list[float]], float]:
    """Return the workers' minibatches a second, and the server's bytes a row; nothing on it."""
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
        active = learner.comm.split(int(comm.rank < count))
        return rate(active, partial(step, kind), seconds) if comm.rank < count else 0.0

    served = medians(learner.comm, _cases(case), rounds, among)
    counts = table.counts()
    learner.finish()
    return served, counts["bytes"] / counts["rows"]
