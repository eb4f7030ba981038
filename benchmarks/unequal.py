"""Samples a second of machines of unequal speed, and steps beside a machine that hangs.

Each of three emulated hosts has a rank; two have a third of the speed of the first. Ranks sleep
while they make a gradient, so hosts on the same core do not slow each other. The limit is the sum
of the speeds. In a second run a rank hangs once; with a quorum the other ranks go on.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from parallel_sgd import (
    SGD,
    Algorithm,
    BlockMomentumSGD,
    Communicator,
    DataParallelSGD,
    DiLoCo,
    Learner,
    Parameters,
)
from parallel_sgd.command_line.units import bits_per_s, rate_text
from parallel_sgd.data import Source

from .on_ranks import on_hosts
from .report import Report, positive

SLOWNESS = (1, 3, 3)  #: of each rank
SAMPLE_S = 2e-3  #: of the fastest rank
MINIBATCH = 96
BLOCK = 32  #: minibatches
HANG_S = 10.0

CASES: dict[str, Algorithm[Any]] = {
    "a sum in every step, 1 bit": DataParallelSGD(gradient_bits=1),
    "block momentum, 4 bits": BlockMomentumSGD(sync_steps=BLOCK, gradient_bits=4),
    "DiLoCo in 4 fragments, 32 bits, overlapped": DiLoCo(
        sync_steps=BLOCK, fragments=4, overlap_samples=4 * MINIBATCH
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rate", type=bits_per_s, default=1e7, help="of every link (default: 10mbit)")
    add("--values", type=positive, default=250_000, help="of the model (default: 250000)")
    add("--blocks", type=positive, default=8, help=f"of {BLOCK} minibatches (default: 8)")


def main(options: argparse.Namespace) -> Report:
    asked = {"values": options.values, "blocks": options.blocks}
    measured = on_hosts(len(SLOWNESS), options.rate, "unequal", asked)
    report = Report(
        f"3 hosts, of which two have a third of the speed, links of {rate_text(options.rate)}, "
        f"{options.values} parameters"
    )
    limit = sum(1 / slowness for slowness in SLOWNESS) / SAMPLE_S
    for name, of_shares in measured["samples_per_s"].items():
        for shares, value in of_shares.items():
            text = "the sum of their speeds"
            report.compare(f"{name}, {shares} shares", value, "samples/s", text, limit, ".0f")
    for name, value in measured["longest_step_s"].items():
        report.compare(
            f"longest step beside a rank that hangs, {name}", value, "s", "the hang", HANG_S
        )
    return report


def measure(comm: Communicator, values: int, blocks: int) -> dict[str, Any]:
    """Measure on all ranks: "samples_per_s" by case and shares, and "longest_step_s" by quorum."""
    return {
        "samples_per_s": {
            name: {
                shares or "equal": samples_per_s(comm, algorithm, shares, values, blocks)
                for shares in (None, "measured")
            }
            for name, algorithm in CASES.items()
        },
        "longest_step_s": {
            f"{quorum or 'all'} of {comm.size} ranks in an outer step": longest_step_s(
                comm, quorum, values
            )
            for quorum in (None, comm.size - 1)
        },
    }


def samples_per_s(
    comm: Communicator, algorithm: Algorithm[Any], shares: str | None, values: int, blocks: int
) -> float:
    """Return the samples a second of all ranks, without two first blocks. Collective."""
    learner, source = _start(comm, algorithm, values, blocks + 2, shares)
    begin = time.perf_counter()
    for number, (x, _) in enumerate(source.minibatches(learner)):
        if number == 2 * BLOCK:
            begin = time.perf_counter()
        _make_gradient(learner, SLOWNESS[comm.rank] * SAMPLE_S * len(x))
        learner.step(samples=len(x))
    learner.finish()
    seconds: float = max(comm.allgather_object(time.perf_counter() - begin))
    return blocks * BLOCK * MINIBATCH / seconds


def longest_step_s(comm: Communicator, quorum: int | None, values: int) -> float:
    """Return the longest step beside the hanging rank, without its gradient. Collective."""
    algorithm = BlockMomentumSGD(sync_steps=BLOCK, gradient_bits=4, quorum=quorum)
    learner, source = _start(comm, algorithm, values, 4)
    hangs, longest = comm.rank == comm.size - 1, 0.0
    for number, (x, _) in enumerate(source.minibatches(learner)):
        _make_gradient(learner, HANG_S if hangs and number == BLOCK else SAMPLE_S * len(x))
        begin = time.perf_counter()
        learner.step(samples=len(x))
        longest = max(longest, time.perf_counter() - begin)
    learner.finish()
    others: float = max(comm.allgather_object(0.0 if hangs else longest))
    return others


def _start(
    comm: Communicator,
    algorithm: Algorithm[Any],
    values: int,
    blocks: int,
    shares: str | None = None,
) -> tuple[Learner, Source]:
    parameters = Parameters({f"w{i}": np.zeros(values // 8, np.float32) for i in range(8)})
    data = np.zeros((blocks * BLOCK * MINIBATCH, 1), np.float32)
    source = Source(data, data, MINIBATCH, epochs=1, shares=shares)
    return Learner(parameters, SGD(lr=0.1), algorithm, comm), source


def _make_gradient(learner: Learner, seconds: float) -> None:
    """Fill the gradient, of a mean of squares about a vector of this rank, in so many seconds."""
    begin = time.perf_counter()
    np.subtract(learner.parameters.flat, learner.comm.rank, out=learner.gradient.flat)
    time.sleep(max(0.0, seconds - (time.perf_counter() - begin)))
