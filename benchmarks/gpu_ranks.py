"""What each of several ranks that share one GPU runs, for `benchmarks.gpu`."""

from __future__ import annotations

import importlib
import statistics
import time
from typing import Any

import numpy as np

from parallel_sgd import Communicator, Parameters, UserError
from parallel_sgd.compression import codec_for
from parallel_sgd.exchange import Exchange

CHECKED = 100_003  #: values whose sum is compared with the same exchange in NumPy
STEPS = 3


def measure(comm: Communicator, values: int, rounds: int) -> dict[str, float]:
    """Compare sums on the GPU with sums on the CPU, then time them: seconds by bits."""
    cupy: Any = importlib.import_module("cupy")
    _compare(comm, cupy)
    parameters = Parameters({"W": cupy.zeros(values, np.float32)})
    random = np.random.default_rng(comm.rank)
    vector = cupy.asarray(random.standard_normal(values, np.float32))
    compressed = Exchange(parameters, comm, codec_for(1))
    residuals = compressed.residuals(parameters)
    full = Exchange(parameters, comm)
    seconds: dict[str, list[float]] = {"1": [], "32": []}
    for i in range(rounds + 1):
        for bits, exchange in (("1", compressed), ("32", full)):
            total = vector.copy()
            cupy.cuda.Device().synchronize()
            comm.barrier()
            begin = time.perf_counter()
            exchange.sum(total, residuals)
            cupy.cuda.Device().synchronize()
            slowest = max(comm.allgather_object(time.perf_counter() - begin))
            if i > 0:
                seconds[bits].append(slowest)
    return {bits: statistics.median(times) for bits, times in seconds.items()}


def _compare(comm: Communicator, cupy: Any) -> None:
    """The same sums with NumPy and with CuPy must agree in every bit, residuals included."""
    host = Parameters({"W": np.zeros(CHECKED - 7, np.float32), "b": np.zeros(7, np.float32)})
    device = Parameters({name: cupy.asarray(host[name]) for name in host})
    random = np.random.default_rng(comm.rank)
    for bits in (1, 2, 4, 8, 16):
        exchanges = [Exchange(p, comm, codec_for(bits)) for p in (host, device)]
        residuals = [e.residuals(p) for e, p in zip(exchanges, (host, device), strict=True)]
        for _ in range(STEPS):
            given = random.standard_normal(CHECKED).astype(np.float32)
            sums = [given.copy(), cupy.asarray(given)]
            for exchange, total, kept in zip(exchanges, sums, residuals, strict=True):
                exchange.sum(total, kept)
            pairs = [sums, [r.own for r in residuals], [r.total for r in residuals]]
            if any(a.tobytes() != cupy.asnumpy(b).tobytes() for a, b in pairs):
                raise UserError(f"the sum over ranks at {bits} bits differs between GPU and CPU")
