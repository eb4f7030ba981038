"""Local updates on K ranks of this machine: what a local step and the end of a block cost.

A local step should cost the optimizer's own pass over memory and allocate nothing; the end of a
block one exchange, alone in the same ranks, and a few passes over the model. With overlap the
exchange runs while the next block trains; the gradients are made by sleeping here, so that cores
are free for it, as they are where gradients are calculated on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from parallel_sgd import BlockMomentumSGD, Communicator, Learner, MomentumSGD, Parameters
from parallel_sgd.compression import codec_for
from parallel_sgd.costs import bytes_sent
from parallel_sgd.exchange import Exchange

from .on_ranks import on_ranks
from .report import Report, positive

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
    bare = measured["optimizer"]
    report.add(
        "local step",
        measured["local_step"] * 1e3,
        "ms",
        f"the optimizer's kernel alone, {bare * 1e3:.2f} ms",
        measured["local_step"] / bare,
    )
    report.add(
        "bytes allocated in a local step, after the first",
        measured["allocated"],
        "B",
        f"the model, {4 * n:,} B",
        measured["allocated"] / (4 * n),
    )
    for bits in map(str, BITS):
        alone, end = measured["exchange"][bits], measured["block_end"][bits]
        report.add(
            f"end of a block, {bits} bit",
            end * 1e3,
            "ms",
            f"the exchange alone, {alone * 1e3:.1f} ms",
            end / alone,
        )
    for bits in map(str, BITS):
        sent = measured["bytes"][bits]
        theory = bytes_sent(n, int(bits), k)
        ratio = sent / theory if theory else None
        name = f"bytes a rank sends in a block, {bits} bit"
        report.add(name, sent, "B", f"one exchange in theory, {theory:,.0f} B", ratio)
    for bits in map(str, BITS):
        waiting, hidden, compute = (measured[key][bits] for key in ("waiting", "hidden", "compute"))
        report.add(
            f"a block's time beyond its gradients, {bits} bit, with overlap",
            (hidden - compute) * 1e3,
            "ms",
            f"without overlap, {(waiting - compute) * 1e3:.1f} ms",
            (hidden - compute) / (waiting - compute),
        )
    return report


def measure(comm: Communicator, values: int, rounds: int) -> dict[str, Any]:
    """What each rank runs; times are medians of the slowest rank's."""
    parameters = Parameters({"w": np.zeros(values, np.float32)})
    gradient = np.random.default_rng(comm.rank).standard_normal(values, np.float32)
    kernel = MomentumSGD(lr=0.1).bind(Parameters({"w": np.zeros(values, np.float32)}))
    measured: dict[str, Any] = {
        "optimizer": _median(comm, lambda: kernel(gradient, 1), rounds * BLOCK),
        "exchange": {},
    }
    local = _learner(comm, values, 32, block=10**6)
    local.gradient.flat[:] = gradient
    _step(local)
    measured["local_step"] = _median(comm, lambda: _step(local), rounds * BLOCK)
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
        return _median(comm, lambda: full.sum(vector), rounds)
    codec = codec_for(bits)
    two_stage = Exchange(parameters, comm, codec)
    residuals = two_stage.residuals(parameters)
    return _median(comm, lambda: two_stage.sum(vector, residuals), rounds)


def _block_end(comm: Communicator, learner: Learner, rounds: int) -> float:
    """Seconds of the last step of a block; takes `rounds` + 1 blocks."""
    times = []
    for _ in range(rounds + 1):
        for _ in range(BLOCK - 1):
            _step(learner)
        times.append(_slowest(comm, lambda: _step(learner)))
    return statistics.median(times[1:])


def _block_time(
    comm: Communicator, values: int, bits: int, overlap: int, pause: float, rounds: int
) -> float:
    """Seconds of a block whose gradients take `pause` seconds each, without using a core."""
    learner = _learner(comm, values, bits, overlap=overlap)
    learner.gradient.flat.fill(1)

    def block() -> None:
        for _ in range(BLOCK):
            time.sleep(pause)
            _step(learner)

    seconds = _median(comm, block, rounds)
    learner.finish()
    return seconds


def _median(comm: Communicator, call: Callable[[], None], rounds: int) -> float:
    times = [_slowest(comm, call) for _ in range(rounds + 2)]
    return statistics.median(times[2:])


def _slowest(comm: Communicator, call: Callable[[], None]) -> float:
    comm.barrier()
    begin = time.perf_counter()
    call()
    seconds: list[float] = comm.allgather_object(time.perf_counter() - begin)
    return max(seconds)
