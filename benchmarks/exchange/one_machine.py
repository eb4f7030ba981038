"""Inside one machine: bytes against the theory, seconds against MPI_Allreduce.

Theory, in bytes sent by a rank: 2 (K-1)/K n (b/8 + 4/block) for 4 and 8 bits, 2 (K-1)/K n b/8 for
all more; an entropy code is within some percent of this. MPI_Allreduce of the same vector in
float32 runs in turn with our sums, in the same ranks. A step of a tiny model shows the cost of
everything beside the MPI calls.
"""

from __future__ import annotations

import functools
import statistics
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from parallel_sgd import SGD, Communicator, DataParallelSGD, Learner, Parameters
from parallel_sgd.algorithms import ExchangeState
from parallel_sgd.compression import registered_bits
from parallel_sgd.costs import bytes_sent
from parallel_sgd.exchange import ExchangeOptions

from ..on_ranks import on_ranks
from ..report import Report
from ..timing import in_turn, median_s

BITS: tuple[Any, ...] = registered_bits()
TINY = 650  #: parameters of a softmax regression on digits


def compared(k: int, n: int, rounds: int) -> Report:
    """Return the table for K ranks and n values."""
    measured = on_ranks(k, "exchange.one_machine", {"values": n, "rounds": rounds})
    report = Report(f"sums of {n} float32 over {k} ranks of one machine, a thread each")
    allreduce, tiny = measured["allreduce"] * 1e3, measured["tiny_allreduce"] * 1e6
    seconds, pipelined = measured["seconds"], measured["pipelined"]
    for width in map(str, BITS):
        name, peer = f"{width} bit, time", "MPI_Allreduce of float32"
        report.compare(name, seconds[width] * 1e3, "ms", peer, allreduce)
    for width in map(str, BITS):
        name, peer = f"{width} bit, transport pipelined, time", "transport collective"
        report.compare(name, pipelined[width] * 1e3, "ms", peer, seconds[width] * 1e3)
    for bits in BITS:
        name, sent = f"{bits} bit, bytes sent by a rank", measured["bytes"][str(bits)]
        report.compare(name, sent, "B", "theory", bytes_sent(n, bits, k), ",.0f")
    limit = 4 + 4 / k + 1
    for size, memory in measured["memory_per_parameter"].items():
        name, reference = f"1 bit, extra memory for {size} parameters", f"4 + 4/K + 1 = {limit:.2f}"
        report.add(name, memory, "B/parameter", reference, memory / limit)
    for bits in (32, 1):
        name, step = f"step of {TINY} parameters, {bits} bit", measured["tiny_step"][str(bits)]
        report.compare(name, step * 1e6, "us", f"MPI_Allreduce of {4 * TINY} bytes", tiny)
    own = "our own part of a step: Python, encode, decode, update"
    report.add("the same on one rank alone, 1 bit", measured["alone"] * 1e6, "us", own, None)
    return report


def measure(comm: Communicator, values: int, rounds: int) -> dict[str, Any]:
    """Measure on all ranks; times are medians over the rounds of the slowest rank."""
    from mpi4py import MPI

    random = np.random.default_rng(comm.rank)
    parameters = Parameters({"W": np.zeros(values, np.float32)})
    gradient = parameters.like()
    gradient.flat[:] = random.standard_normal(values, np.float32)
    total = np.empty_like(gradient.flat)
    memory = {size: _extra_memory(size, comm) for size in (10**6, values)}

    def allreduce() -> None:
        MPI.COMM_WORLD.Allreduce(gradient.flat, total)

    calls: dict[str, Callable[[], None]] = {"allreduce": allreduce}
    exchanges: dict[str, Any] = {}
    for bits in BITS:
        for transport in ("collective", "pipelined"):
            options = ExchangeOptions(gradient_bits=bits, transport=transport)
            exchange = ExchangeState.init(options, parameters, lambda: 0, comm)
            calls[f"{bits}, {transport}"] = functools.partial(exchange.sum, total)
            if transport == "collective":
                exchanges[str(bits)] = exchange

    def given() -> None:
        total[:] = gradient.flat

    times = in_turn(calls, rounds, comm, before=given)
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {
        "allreduce": medians["allreduce"],
        "seconds": {bits: medians[f"{bits}, collective"] for bits in exchanges},
        "pipelined": {bits: medians[f"{bits}, pipelined"] for bits in exchanges},
        "bytes": {bits: e.bytes_sent / (rounds + 1) for bits, e in exchanges.items()},
        "memory_per_parameter": memory,
        "tiny_step": {bits: _tiny_step(comm, bits) for bits in (32, 1)},
        "tiny_allreduce": _tiny_allreduce(comm),
        "alone": _tiny_step(Communicator.single(), 1),
    }


def _extra_memory(size: int, comm: Communicator) -> float:
    """Return the bytes per parameter of an exchange with 1 bit, beside model and gradient."""
    parameters = Parameters({"W": np.zeros(size, np.float32)})
    options = ExchangeOptions(gradient_bits=1)
    ExchangeState.init(options, parameters, lambda: 0, comm)  # loads the kernels: they take memory
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    state = ExchangeState.init(options, parameters, lambda: 0, comm)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del state
    return (after - before) / size


def _tiny_step(comm: Communicator, bits: int) -> float:
    parameters = Parameters({"W": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)})
    learner = Learner(parameters, SGD(lr=1e-3), DataParallelSGD(gradient_bits=bits), comm)
    gradient = np.random.default_rng(comm.rank).standard_normal(TINY).astype(np.float32)

    def step() -> None:
        learner.gradient.flat[:] = gradient
        learner.step(samples=1)

    step()
    return median_s(step, 5, comm, warm_up=0, repeat=500)


def _tiny_allreduce(comm: Communicator) -> float:
    from mpi4py import MPI

    send, receive = np.ones(TINY, np.float32), np.empty(TINY, np.float32)

    def call() -> None:
        MPI.COMM_WORLD.Allreduce(send, receive)

    call()
    return median_s(call, 5, comm, warm_up=0, repeat=500)
