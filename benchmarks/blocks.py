"""Local updates on K ranks of this machine: what a local step and the end of a block cost.

A local step should cost the optimizer's own pass over memory and allocate nothing; the end of a
block one exchange, alone in the same ranks, and a few passes over the model. With overlap the
exchange runs while the next block trains; the gradients are made by sleeping here, so that cores
are free for it, as they are where gradients are calculated on a GPU.
"""

from __future__ import annotations

import argparse
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
from .timing import median_s

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
    for bits in map(str, BITS):
        alone, end = (measured[key][bits] * 1e3 for key in ("exchange", "block_end"))
        report.compare(f"end of a block, {bits} bit", end, "ms", "the exchange alone", alone)
    for bits in map(str, BITS):
        name, theory = f"bytes a rank sends in a block, {bits} bit", bytes_sent(n, int(bits), k)
        sent = measured["bytes"][bits]
        report.compare(name, sent, "B", "one exchange in theory", theory, ",.0f")
    for bits in map(str, BITS):
        waiting, hidden, compute = (
            measured[key][bits] * 1e3 for key in ("waiting", "hidden", "compute")
        )
        name = f"a block's time beyond its gradients, {bits} bit, with overlap"
        report.compare(name, hidden - compute, "ms", "without overlap", waiting - compute)
    return report


def measure(comm: Communicator, values: int, rounds: int) -> dict[str, Any]:
    """Measure on all ranks; times are medians of the slowest rank."""
    parameters = Parameters({"w": np.zeros(values, np.float32)})
    gradient = np.random.default_rng(comm.rank).standard_normal(values, np.float32)
    kernel = MomentumSGD(lr=0.1).bind(Parameters({"w": np.zeros(values, np.float32)}))
    measured: dict[str, Any] = {
        "optimizer": median_s(lambda: kernel(gradient, 1), rounds * BLOCK, comm, warm_up=2),
        "exchange": {},
    }
    local = _learner(comm, values, 32, block=10**6)
    local.gradient.flat[:] = gradient
    _step(local)
    measured["local_step"] = median_s(lambda: _step(local), rounds * BLOCK, comm, warm_up=2)
    tracemalloc.start()
    _step(local)
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    _step(local)
    measured["allocated"] = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()

    for bits in BITS:
        measured["exchange"][str(bits)] = _exchange_alone(comm, parameters, gradient, bits, rounds)
    names = ("block_end", "bytes", "waiting", "hidden", "compute")
    measured |= {name: {} for name in names}
    for bits in BITS:
        learner = _learner(comm, values, bits)
        learner.gradient.flat[:] = gradient
        end = _block_end(comm, learner, rounds) - measured["local_step"]
        measured["block_end"][str(bits)] = end
        measured["bytes"][str(bits)] = learner.bytes_sent // (rounds + 1)
        pause = 2 * measured["exchange"][str(bits)] / BLOCK
        measured["compute"][str(bits)] = BLOCK * (pause + measured["local_step"])
        for name, overlap in (("waiting", 0), ("hidden", BLOCK * comm.size)):
            measured[name][str(bits)] = _block_time(comm, values, bits, overlap, pause, rounds)
    return measured


def _learner(
    comm: Communicator, values: int, bits: int, block: int = BLOCK, overlap: int = 0
) -> Learner:
    algorithm = BlockMomentumSGD(sync_steps=block, gradient_bits=bits, overlap_samples=overlap)
    parameters = Parameters({"w": np.zeros(values, np.float32)})
    return Learner(parameters, MomentumSGD(lr=0.1), algorithm, comm)


def _step(learner: Learner) -> None:
    learner.announce(1, learner.comm.size)
    learner.step(samples=1)


def _exchange_alone(
    comm: Communicator, parameters: Parameters, gradient: Any, bits: int, rounds: int
) -> float:
    vector = gradient.copy()
    if bits == 32:
        full = Exchange(parameters, comm)
        return median_s(lambda: full.sum(vector), rounds, comm, warm_up=2)
    codec = codec_for(bits)
    two_stage = Exchange(parameters, comm, codec)
    residuals = two_stage.residuals(parameters)
    return median_s(lambda: two_stage.sum(vector, residuals), rounds, comm, warm_up=2)


def _block_end(comm: Communicator, learner: Learner, rounds: int) -> float:
    """Return the seconds of the last step of a block; takes `rounds` + 1 blocks."""

    def all_but_the_last() -> None:
        for _ in range(BLOCK - 1):
            _step(learner)

    return median_s(lambda: _step(learner), rounds, comm, before=all_but_the_last)


def _block_time(
    comm: Communicator, values: int, bits: int, overlap: int, pause: float, rounds: int
) -> float:
    """Return the seconds of a block whose gradients take `pause` seconds each, without a core."""
    learner = _learner(comm, values, bits, overlap=overlap)
    learner.gradient.flat.fill(1)

    def block() -> None:
        for _ in range(BLOCK):
            time.sleep(pause)
            _step(learner)

    seconds = median_s(block, rounds, comm, warm_up=2)
    learner.finish()
    return seconds
