"""Pushes and pulls of a whole model: our learner and our client, and the bare loop beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd import SGD, Communicator, DataParallelASGD, Learner, Parameters
from parallel_sgd.communication.mpi.init_timeout import kill_if_longer_than
from parallel_sgd.kernels import body

from ..timing import median_s
from .bare import Exchange, bare_server, bare_worker, median_rates, quiet_barrier, rate

Array = npt.NDArray[Any]

WORKERS = 3
LR = 1e-6
BARE = ("bare", "bare, step", "bare, 1 bit")


def measure(
    comm: Communicator, values: int, rounds: int, seconds: float, servers: int
) -> dict[str, Any]:
    """Measure on all ranks: the first three work; then come the servers of a case.

    Returns:
        "updates": a second, of all workers together, by the case's name, medians over the rounds;
        "bytes": of a push, by its bits; "step_s": the server's kernel alone; "where": mean seconds
        of an update of our learner, by `Seconds`.
    """
    where: dict[str, float] = {}
    sent: dict[str, float] = {}
    cases: dict[str, Callable[[], float]] = {
        name: partial(bare, comm, values, seconds, name) for name in BARE
    }
    for count in range(1, servers + 1):
        cases[f"learner, {count}"] = partial(
            ours, comm, values, seconds, sent, where if count == 1 else {}, servers=count
        )
    cases["client"] = partial(ours, comm, values, seconds, {}, {}, client=True)
    cases["learner, 1 bit"] = partial(ours, comm, values, seconds, sent, {}, bits=1)
    limit = 60 + 5 * (rounds + 1) * len(cases) * (seconds + 1)
    with kill_if_longer_than(limit, comm.rank, "the dense benchmark"):
        quiet_barrier()
        step_s = _alone(values) if comm.rank == 0 else 0.0
        updates = median_rates(comm, cases, rounds)
    return {"updates": updates, "bytes": sent, "step_s": step_s, "where": where}


def pushed_bytes(values: int) -> int:
    """Return the bytes of a push in 1 bit, on average."""
    return values // 8


def _step(pushed: Array, model: Array) -> None:
    """SGD: the server's pass over its model, both as bytes."""
    x = model.view(np.float32)
    body(x).sgd_step(x, pushed.view(np.float32), np.float32(LR))


def _alone(values: int) -> float:
    """Seconds of `_step`, nothing beside it."""
    pushed, model = np.ones(values, np.float32), np.ones(values, np.float32)
    return median_s(lambda: _step(pushed, model), 50, warm_up=0)


def bare(
    comm: Communicator, values: int, seconds: float, name: str, workers: int = WORKERS
) -> float:
    """This rank's updates a second of the bare loop; the rank after the workers serves."""
    pushed = pushed_bytes(values) if name == "bare, 1 bit" else 4 * values
    change = _step if name == "bare, step" else None
    exchanges = [Exchange(pushed, 4 * values, change)]
    others = comm.split(int(comm.rank < workers))
    if comm.rank < workers:
        return bare_worker(others, workers, exchanges, seconds)
    if comm.rank == workers:
        bare_server(workers, exchanges)
    return 0.0


def ours(
    comm: Communicator,
    values: int,
    seconds: float,
    sent: dict[str, float],
    where: dict[str, float],
    *,
    workers: int = WORKERS,
    servers: int = 1,
    bits: int = 32,
    client: bool = False,
) -> float:
    """This rank's updates a second: of `learner.step`, or of the client's push alone."""
    takes_part = comm.rank < workers + servers
    group = comm.split(int(takes_part))
    if not takes_part:
        return 0.0
    model = Parameters({"W": np.zeros((values // 1024, 1024), np.float32)})
    algorithm = DataParallelASGD(servers=servers, gradient_bits=bits, sync_steps=1)
    learner = Learner(model, SGD(lr=LR), algorithm, group)
    updates = 0.0
    if not learner.serves:
        gradient, x = learner.gradient.flat, learner.parameters.flat
        gradient[:] = np.random.default_rng(comm.rank).standard_normal(values)
        asking = learner.state.client

        def step() -> None:
            if client:
                asking.push(gradient, None, 1, 1.0, out=x)
            else:
                learner.step(samples=1)

        updates = rate(learner.comm, step, seconds)
        sent[str(bits)] = asking.statistics.bytes_sent / asking.clock
        for name, spent in asking.statistics.as_dict()["seconds"].items():
            where[name] = spent / asking.clock
    learner.finish()
    return updates
