"""Rows of an embedding table, pulled and pushed by workers of a server, beside a bare loop of MPI
with as many bytes.

Ids are random over 10**11, and drawn from the table's ids, in a new order.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        "served", "bare": rows a second of both workers, by "pull", "push" or "both" (each row
        pulled and pushed), of medians over the rounds; "bytes": of the server's table, a row.
    """
    pull, push = (ID * batch, ROW * batch), ((ID + ROW) * batch, HEADER)
    cases = {}
    for kind, sizes in {"pull": [pull], "push": [push], "both": [pull, push]}.items():
        exchanges = [(ones(sent), ones(answered)) for sent, answered in sizes]
        cases[kind] = partial(bare, comm, WORKERS, WORKERS, exchanges, seconds)
    beside = medians(comm, cases, rounds)
    served, nbytes = _served(comm, touched, batch, rounds, seconds)
    rates = {"bare": beside, "served": served}
    rows = {
        of: {kind: batch * sum(case) for kind, case in found.items()} for of, found in rates.items()
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


def _served(
    comm: Communicator, touched: int, batch: int, rounds: int, seconds: float
) -> tuple[dict[str, list[float]], float]:
    """Return the workers' minibatches a second, and the server's bytes a row; nothing on it."""
    model = Parameters({"w": np.zeros(1, np.float32)})
    algorithm = DataParallelASGD(servers=1, sync_steps=1, tables=(TABLE,))
    learner = Learner(model, SGD(lr=0.1), algorithm, comm)
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

    cases = {kind: partial(rate, learner.comm, partial(step, kind), seconds) for kind in KINDS}
    served = medians(learner.comm, cases, rounds, learner.comm.barrier)
    counts = table.counts()
    learner.finish()
    return served, counts["bytes"] / counts["rows"]
