"""Seconds of exchanges, on the ranks of `python -m benchmarks plan`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from parallel_sgd import Communicator, Parameters
from parallel_sgd.algorithms import ExchangeState
from parallel_sgd.exchange import ExchangeOptions

SECONDS = 0.6  #: of a case, about, beside the rounds that it takes at least
LEAST, MOST = 3, 40  #: rounds of a case


def measure(
    comm: Communicator, sizes: list[int], bits: list[float], transport: str
) -> list[dict[str, Any]]:
    """What each rank runs.

    Args:
        sizes: values of the vectors.
        bits: of the exchanges.
        transport: how messages travel, as `ExchangeOptions` knows it.
    Returns:
        For every size and bits, the median over rounds of the slowest rank's seconds, and whether
        the exchange is pipelined.
    """
    return [_exchange(comm, values, width, transport) for values in sizes for width in bits]


def _exchange(comm: Communicator, values: int, bits: float, transport: str) -> dict[str, Any]:
    parameters = Parameters({"W": np.zeros(values, np.float32)})
    gradient = parameters.like().flat
    gradient[:] = np.random.default_rng(comm.rank).standard_normal(values, np.float32)
    total = np.empty_like(gradient)
    options = ExchangeOptions(gradient_bits=bits, transport=transport)
    exchange = ExchangeState.init(options, parameters, lambda: 0, comm)

    def once() -> float:
        total[:] = gradient
        return _slowest(comm, lambda: exchange.sum(total))

    once()
    rounds = max(LEAST, min(MOST, round(SECONDS / once())))
    return {
        "values": values,
        "bits": bits,
        "seconds": statistics.median(once() for _ in range(rounds)),
        "pipelined": exchange.plan.transport == "pipelined",
    }


def _slowest(comm: Communicator, call: Callable[[], None]) -> float:
    comm.barrier()
    begin = time.perf_counter()
    call()
    slowest: float = max(comm.allgather_object(time.perf_counter() - begin))
    return slowest
