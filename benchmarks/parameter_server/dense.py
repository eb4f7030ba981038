"""Pushes and pulls of a whole model: our learner and our client, and the bare loop beside them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from parallel_sgd import SGD, Communicator, DataParallelASGD, Learner, Parameters
from parallel_sgd.command_line.cluster import BURST, payload_rate
from parallel_sgd.kernels import body

from .bare import Array, bare, medians, ones, rate

WORKERS = 3
LR = 1e-6

Cases = dict[str, dict[str, Any]]
"""Options of `_peer` (with "peer") or of `_ours`, by the case's name."""


def cases_here(servers: int) -> Cases:
    """Return the cases of one machine."""
    return {
        "bare": {"peer": True},
        "bare, step": {"peer": True, "steps": True},
        "bare, 1 bit": {"peer": True, "bits": 1},
        **{f"learner, {count}": {"servers": count} for count in range(1, servers + 1)},
        "client": {"client": True},
        "learner, 1 bit": {"bits": 1},
    }


def cases_on_hosts(hosts: int) -> Cases:
    """Return the cases over links: who, for how many workers, in how many bits."""
    return {
        f"{who}, {workers}, {bits}": {"peer": who == "bare", "workers": workers, "bits": bits}
        for workers in numbers(hosts)
        for bits in (32, 1)
        for who in ("bare", "learner")
    }


def measure(
    comm: Communicator, values: int, rounds: int, seconds: float, cases: Cases
) -> dict[str, float]:
    """Return updates a second of all workers together in each case, of medians of the rounds.

    The first ranks work; then come a case's servers.
    """
    calls = {}
    for name, options in cases.items():
        how = {"workers": WORKERS, "bits": 32, **options}
        case = _peer if how.pop("peer", False) else _ours
        calls[name] = partial(case, comm, values, seconds, **how)
    return {name: sum(rates) for name, rates in medians(comm, calls, rounds).items()}


def pushed_bytes(values: int, bits: int) -> int:
    """Return the bytes of a push, on average."""
    return values * bits // 8


def _step(pushed: Array, model: Array) -> None:
    """SGD: the server's pass over its model, both as bytes."""
    x = model.view(np.float32)
    body(x).sgd_step(x, pushed.view(np.float32), np.float32(LR))


def _peer(
    comm: Communicator, values: int, seconds: float, workers: int, bits: int, steps: bool = False
) -> float:
    """Return this rank's updates a second of the bare loop.

    Args:
        steps: let the server take the step of SGD.
    """
    exchange = ones(pushed_bytes(values, bits)), ones(4 * values)
    return bare(comm, workers, workers, [exchange], seconds, _step if steps else None)


def _ours(
    comm: Communicator,
    values: int,
    seconds: float,
    workers: int,
    bits: int,
    servers: int = 1,
    client: bool = False,
) -> float:
    """Return this rank's updates a second: of `learner.step`, or of the client's push alone."""
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

        def step() -> None:
            if client:
                learner.state.client.push(gradient, None, 1, 1.0, out=x)
            else:
                learner.step(samples=1)

        updates = rate(learner.comm, step, seconds)
    learner.finish()
    return updates


def numbers(hosts: int) -> list[int]:
    """Return the numbers of workers: 1, and all hosts but the server's."""
    return sorted({1, hosts - 1})


def limit(workers: int, pushed: int, pulled: int, rate: float) -> float:
    """Return the most updates a second on links of a rate in bits/s; infinity: no limit.

    A single worker's messages follow each other on rested links: `BURST` bytes of each go at once.
    Several workers keep the server's link busy in both directions.
    """
    sizes = [pushed, pulled]
    if workers == 1:
        beyond = sum(max(0, nbytes - BURST) for nbytes in sizes)
        return payload_rate(rate) / beyond if beyond else math.inf
    return payload_rate(rate) / max(sizes)
