"""Inside one machine: bytes against the theory, seconds against MPI_Allreduce.

Theory, in bytes sent by a rank: 2 (K-1)/K n (b/8 + 4/block) for 4 and 8 bits, 2 (K-1)/K n b/8 for
all more; an entropy code is within some percent of this. A step of a tiny model shows the cost of
everything beside the MPI calls.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np

from parallel_sgd import SGD, Communicator, DataParallelSGD, Learner, Parameters
from parallel_sgd.algorithms import ExchangeState
from parallel_sgd.compression import registered_bits
from parallel_sgd.costs import bytes_sent
from parallel_sgd.exchange import ExchangeOptions

from ..on_ranks import on_ranks
from ..report import Report
from ..timing import Call, median_s
from .sums import ALLREDUCE, measure_size

BITS: tuple[Any, ...] = registered_bits()
TINY = 650  #: parameters of a softmax regression on digits


def compared(k: int, n: int, rounds: int) -> Report:
    """Return the table for K ranks and n values."""
    measured = on_ranks(k, "exchange.one_machine", {"values": n, "rounds": rounds})
    report = Report(f"sums of {n} float32 over {k} ranks of one machine, a thread each")
    ms = {name: 1e3 * seconds for name, seconds in measured["seconds"].items()}
    for bits in BITS:
        name, peer = f"{bits} bit, time", "MPI_Allreduce of float32"
        report.compare(name, ms[f"{bits}, collective"], "ms", peer, ms[ALLREDUCE])
    for bits in BITS:
        name, peer = f"{bits} bit, transport pipelined, time", "transport collective"
        report.compare(name, ms[f"{bits}, pipelined"], "ms", peer, ms[f"{bits}, collective"])
    for bits in BITS:
        name, sent = f"{bits} bit, bytes sent by a rank", measured["bytes"][f"{bits}, collective"]
        report.compare(name, sent, "B", "theory", bytes_sent(n, bits, k), ",.0f")
    limit = 4 + 4 / k + 1
    for size, memory in measured["memory_per_parameter"].items():
        name, reference = f"1 bit, extra memory for {size} parameters", f"4 + 4/K + 1 = {limit:.2f}"
        report.add(name, memory, "B/parameter", reference, memory / limit)
    tiny = {name: 1e6 * seconds for name, seconds in measured["tiny"].items()}
    for bits in (32, 1):
        name, peer = f"step of {TINY} parameters, {bits} bit", f"MPI_Allreduce of {4 * TINY} bytes"
        report.compare(name, tiny[f"{bits} bit"], "us", peer, tiny["allreduce"])
    own = "our own part of a step: Python, encode, decode, update"
    report.add("the same on one rank alone, 1 bit", tiny["alone"], "us", own, None)
    return report


def measure(comm: Communicator, values: int, rounds: int) -> dict[str, Any]:
    """Measure on all ranks; times are medians over the rounds of the slowest rank."""
    from mpi4py import MPI

    memory = {size: _extra_memory(size, comm) for size in (10**6, values)}
    cases = {
        f"{bits}, {transport}": {"gradient_bits": bits, "transport": transport}
        for bits in BITS
        for transport in ("collective", "pipelined")
    }
    few, sums = np.ones(TINY, np.float32), np.empty(TINY, np.float32)
    tiny: dict[str, Call] = {
        "32 bit": _tiny_step(comm, 32),
        "1 bit": _tiny_step(comm, 1),
        "allreduce": lambda: MPI.COMM_WORLD.Allreduce(few, sums),
        "alone": _tiny_step(Communicator.single(), 1),
    }
    return {
        **measure_size(comm, values, rounds, cases),
        "memory_per_parameter": memory,
        "tiny": {name: median_s(call, 5, comm, repeat=500) for name, call in tiny.items()},
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


def _tiny_step(comm: Communicator, bits: int) -> Call:
    parameters = Parameters({"W": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)})
    learner = Learner(parameters, SGD(lr=1e-3), DataParallelSGD(gradient_bits=bits), comm)
    gradient = np.random.default_rng(comm.rank).standard_normal(TINY).astype(np.float32)

    def step() -> None:
        learner.gradient.flat[:] = gradient
        learner.step(samples=1)

    return step
