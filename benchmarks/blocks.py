"""Costs of local updates on K ranks of this machine: a local step, and the end of a block.

A local step should cost the optimizer's own pass over memory and allocate nothing; the end of a
block should cost an exchange, alone in the same ranks, and a few passes over the model. With
overlap the exchange runs while the next block trains; the gradients are made by sleeping here, so
that cores are free for the exchange, as with gradients from a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np

from parallel_sgd import BlockMomentumSGD, Communicator, Learner, MomentumSGD, Parameters
from parallel_sgd.compression import codec_for
from parallel_sgd.costs import bytes_sent
from parallel_sgd.exchange import Exchange

from .on_ranks import on_ranks
from .report import Report, positive
from .timing import in_turn, median_s

BLOCK = 8  #: minibatches in a block
BITS = (32, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=positive, default=2, metavar="K", help="(default: 2)")
    parser.add_argument(
        "--values", type=positive, default=1 << 22, help="parameters of the model (default: 2**22)"
    )
    parser.add_argument("--rounds", type=positive, default=25, help="blocks (default: 25)")


def main(options: argparse.Namespace) -> Report:
    k, n = options.ranks, options.values
    measured = on_ranks(k, "blocks", {"values": n, "rounds": options.rounds})
    report = Report(f"block momentum, {n} parameters on {k} ranks of one machine, a thread each")
    bare, step = measured["optimizer"] * 1e3, measured["local_step"] * 1e3
    report.compare("local step", step, "ms", "the optimizer's kernel alone", bare, ".2f")
    name, allocated = "bytes allocated in a local step, after the first", measured["allocated"]
    report.compare(name, allocated, "B", "the model", 4 * n, ",")
    for bits, of in measured["by_bits"].items():
        end, alone = 1e3 * of["block_end"], 1e3 * of["exchange"]
        report.compare(f"end of a block, {bits} bit", end, "ms", "the exchange alone", alone)
        name, theory = f"bytes a rank sends in a block, {bits} bit", bytes_sent(n, int(bits), k)
        report.compare(name, of["bytes"], "B", "one exchange in theory", theory, ",.0f")
        name = f"a block whose gradients take twice the exchange's time, {bits} bit, with overlap"
        report.compare(name, 1e3 * of["hidden"], "ms", "without overlap", 1e3 * of["waiting"])
    return report


def measure(comm: Communicator, values: int, rounds: int) -> dict[str, Any]:
    """Measure on all ranks; times are medians of the slowest rank."""
    gradient = np.random.default_rng(comm.rank).standard_normal(values, np.float32)

    def parameters() -> Parameters:
        return Parameters({"w": np.zeros(values, np.float32)})

    def learner_of(bits: int, block: int = BLOCK, overlap: int = 0) -> Learner:
        how = {"sync_steps": block, "gradient_bits": bits, "overlap_samples": overlap}
        learner = Learner(parameters(), MomentumSGD(lr=0.1), BlockMomentumSGD(**how), comm)
        learner.gradient.flat[:] = gradient
        return learner

    def step(learner: Learner, pause: float = 0.0, count: int = 1) -> None:
        for _ in range(count):
            if pause:
                time.sleep(pause)
            learner.announce(1, comm.size)
            learner.step(samples=1)

    kernel, local = MomentumSGD(lr=0.1).bind(parameters()), learner_of(32, block=10**6)
    aligned = local.gradient.flat  # as fast to read as the learner's
    calls = {"optimizer": lambda: kernel(aligned, 1), "step": lambda: step(local)}
    seconds = in_turn(calls, rounds * BLOCK, comm, warm_up=3)
    optimizer, local_step = (statistics.median(seconds[name]) for name in calls)
    tracemalloc.start()
    step(local)
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    step(local)
    allocated = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()

    def block_s(bits: int, overlap: int, pause: float) -> float:
        """Return the seconds of a block whose gradients take `pause` each, without a core."""
        learner = learner_of(bits, overlap=overlap)
        seconds = median_s(lambda: step(learner, pause, BLOCK), rounds, comm, warm_up=2)
        learner.finish()
        return seconds

    def measure_bits(bits: int) -> dict[str, float]:
        exchange = Exchange(parameters(), comm, None if bits == 32 else codec_for(bits))
        vector, residuals = gradient.copy(), exchange.residuals(parameters())
        alone = median_s(lambda: exchange.sum(vector, residuals), rounds, comm, warm_up=2)
        learner = learner_of(bits)
        last = median_s(
            lambda: step(learner), rounds, comm, before=lambda: step(learner, count=BLOCK - 1)
        )
        pause = 2 * alone / BLOCK
        return {
            "exchange": alone,
            "block_end": last - local_step,
            "bytes": learner.bytes_sent // (rounds + 1),
            "waiting": block_s(bits, 0, pause),
            "hidden": block_s(bits, BLOCK * comm.size, pause),
        }

    return {
        "optimizer": optimizer,
        "local_step": local_step,
        "allocated": allocated,
        "by_bits": {str(bits): measure_bits(bits) for bits in BITS},
    }
