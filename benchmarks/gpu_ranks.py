"""What each of several ranks that share one GPU runs, for `benchmarks.gpu`."""

from __future__ import annotations

import importlib
import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np

from parallel_sgd import Communicator, Parameters, UserError
from parallel_sgd.compression import codec_for
from parallel_sgd.exchange import Exchange
from parallel_sgd.trace import NO_TRACE, Trace

CHECKED = 100_003  #: values whose sum is compared with the same exchange in NumPy
STEPS = 3
TRANSPORTS = ("collective", "pipelined")  #: of one GPU; NCCL wants one for each rank


def measure(comm: Communicator, values: int, rounds: int) -> dict[str, dict[str, float]]:
    """Compare sums on the GPU with sums on the CPU, then time them.

    Returns:
        By bits and transport ("1 pipelined"): "seconds" of the slowest rank; and how long this
        rank's host was in each span of one more exchange.
    """
    cupy: Any = importlib.import_module("cupy")
    for transport in TRANSPORTS:
        _compare(comm, cupy, transport)
    parameters = Parameters({"W": cupy.zeros(values, np.float32)})
    random = np.random.default_rng(comm.rank)
    vector = cupy.asarray(random.standard_normal(values, np.float32))
    exchanges = {
        f"{bits} {transport}": Exchange(
            parameters, comm, codec_for(bits) if bits < 32 else None, transport=transport
        )
        for bits in (32, 1)
        for transport in TRANSPORTS
    }
    residuals = exchanges["1 pipelined"].residuals(parameters)
    seconds: dict[str, list[float]] = {name: [] for name in exchanges}
    for i in range(rounds + 1):
        for name, exchange in exchanges.items():
            slowest = max(comm.allgather_object(_timed(comm, cupy, exchange, vector, residuals)))
            if i > 0:
                seconds[name].append(slowest)
    timings = {name: {"seconds": statistics.median(times)} for name, times in seconds.items()}
    for name, exchange in exchanges.items():
        timings[name].update(_parts(comm, cupy, exchange, vector, residuals))
    return timings


def _timed(comm: Communicator, cupy: Any, exchange: Exchange, vector: Any, residuals: Any) -> float:
    total = vector.copy()
    cupy.cuda.Device().synchronize()
    comm.barrier()
    begin = time.perf_counter()
    exchange.sum(total, residuals)
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - begin


def _parts(
    comm: Communicator, cupy: Any, exchange: Exchange, vector: Any, residuals: Any
) -> dict[str, float]:
    trace = comm.trace = Trace()
    _timed(comm, cupy, exchange, vector, residuals)
    comm.trace = NO_TRACE
    parts: dict[str, float] = defaultdict(float)
    for event in trace.events:
        parts[event.name] += event.end_s - event.begin_s
    return parts


def _compare(comm: Communicator, cupy: Any, transport: str) -> None:
    """The same sums with NumPy and with CuPy must agree in every bit, residuals included."""
    host = Parameters({"W": np.zeros(CHECKED - 7, np.float32), "b": np.zeros(7, np.float32)})
    device = Parameters({name: cupy.asarray(host[name]) for name in host})
    random = np.random.default_rng(comm.rank)
    for bits in (1, 2, 4, 8, 16, 32):
        sides = [Exchange(p, comm, codec_for(bits), transport=transport) for p in (host, device)]
        residuals = [e.residuals(p) for e, p in zip(sides, (host, device), strict=True)]
        for _ in range(STEPS):
            given = random.standard_normal(CHECKED).astype(np.float32)
            sums = [given.copy(), cupy.asarray(given)]
            for exchange, total, kept in zip(sides, sums, residuals, strict=True):
                exchange.sum(total, kept)
            worker = [r.worker_error for r in residuals]
            owner = [r.owner_error["0"] for r in residuals]
            pairs = [sums, worker, owner]
            if any(a.tobytes() != cupy.asnumpy(b).tobytes() for a, b in pairs):
                raise UserError(
                    f"the {transport} sum over ranks at {bits} bits differs between GPU and CPU"
                )
