"""The cost model of `parallel-sgd plan` against exchanges that were measured, on emulated hosts.

What the model is given was not fitted to these exchanges: kernels are timed here, messages and
bytes of TCP between two hosts whose links are not limited, and the rate is the links' own. The
hosts share this machine's cores, so kernels and TCP take as many times longer as there are hosts to
a core. An error is predicted over measured, less 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from itertools import product
from typing import Any

import numpy as np

from parallel_sgd import Communicator
from parallel_sgd.command_line.cluster import BURST, payload_rate
from parallel_sgd.command_line.units import bits_per_s, rate_text
from parallel_sgd.compression import registered_bits
from parallel_sgd.costs import Link, exchange_s, measure_kernel_speeds
from parallel_sgd.launcher.host_resources import usable_cores

from .on_ranks import on_hosts
from .report import Report, positive
from .timing import median_s

MEGABYTES = (1, 10, 100)
AIM = 0.15  #: of an error

MESSAGES, ROUNDS = 200, 9
LARGE = 16 << 20  #: bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    several: dict[str, Any] = {"type": positive, "nargs": "+"}
    add("--hosts", default=[2, 3, 4, 8], metavar="K", help="(default: 2 3 4 8)", **several)
    add("--rate", type=bits_per_s, default=1e9, help="of every link (default: 1gbit)")
    bits: dict[str, Any] = {"type": json.loads, "nargs": "+", "choices": registered_bits()}
    add("--bits", default=[32, 4, 1], metavar="B", help="(default: 32 4 1)", **bits)
    sizes = "of float32 (default: 1 10 100)"
    add("--megabytes", default=MEGABYTES, metavar="MB", help=sizes, **several)
    transports = ("auto", "collective", "pipelined")
    add("--transport", choices=transports, default="auto", help="of the exchanges (default: auto)")


def main(options: argparse.Namespace) -> Report:
    link = measured_link(options.rate)
    report = Report(
        f"exchanges on emulated hosts, links of {rate_text(options.rate)}, measured against "
        f"predicted; {usable_cores()} cores"
    )
    report.add("latency of a message", link.latency_s * 1e6, "us", "two hosts", None)
    report.add("a core's time for a message", link.message_s * 1e6, "us", "two hosts", None)
    report.add("a core's time for a megabyte", link.core_s_per_byte * 1e12, "us", "two hosts", None)
    errors = []
    cases = {
        str(bits): {"gradient_bits": bits, "transport": options.transport} for bits in options.bits
    }
    sizes = [mb * 250_000 for mb in options.megabytes]
    asked = {"sizes": sizes, "rounds": 3, "cases": cases, "burst": 2 * BURST}
    for count in options.hosts:
        speeds = measure_kernel_speeds()  # now: a machine that others use has slower minutes
        measured = on_hosts(count, options.rate, "exchange.sums", asked)
        for of_size, bits in product(measured, options.bits):
            values, seconds = of_size["values"], of_size["seconds"][str(bits)]
            predicted = exchange_s(
                *(values, bits, count, link, speeds),
                cores_per_rank=usable_cores() / count,
                pipelined=of_size["plans"][str(bits)]["transport"] == "pipelined",
            ).total_s
            error = predicted / seconds - 1
            errors.append(abs(error))
            name = f"{count} hosts, {values / 250_000:g} MB, {bits} bit"
            reference = f"predicted, {predicted * 1e3:.2f} ms, error {error:+.0%}"
            report.add(name, seconds * 1e3, "ms", reference, seconds / predicted)
    for name, error in (("largest", max(errors)), ("median", statistics.median(errors))):
        report.add(f"{name} error", 100 * error, "%", f"aim: {100 * AIM:g} %", error / AIM)
    return report


def measured_link(rate: float) -> Link:
    """Return a link of a given rate, with messages and bytes as two hosts measure them."""
    fields = on_hosts(2, math.inf, "plan:measure_link", {})
    return Link(bytes_per_s=payload_rate(rate), **fields)


def measure_link(comm: Communicator) -> dict[str, float]:
    """Return the fields of a `Link`, measured between two ranks: medians over the rounds.

    Both ranks send at once, each with a core of its own. So the time of a message or a byte is the
    time that its sender and its receiver spend on it.
    """
    from mpi4py import MPI

    world, peer = MPI.COMM_WORLD, 1 - comm.rank
    few, many = np.zeros(8, np.uint8), np.zeros(LARGE, np.uint8)
    into = [np.empty_like(few) for _ in range(MESSAGES)]
    large = np.empty_like(many)

    def ping_pong() -> None:
        for _ in range(MESSAGES):
            if comm.rank == 0:
                world.Send(few, peer)
            world.Recv(into[0], peer)
            if comm.rank == 1:
                world.Send(few, peer)

    def messages() -> None:
        receives = [world.Irecv(buffer, peer) for buffer in into]
        MPI.Request.Waitall([*receives, *(world.Isend(few, peer) for _ in into)])

    def both_ways() -> None:
        world.Sendrecv(many, peer, recvbuf=large, source=peer)

    return {
        "latency_s": median_s(ping_pong, ROUNDS, comm) / (2 * MESSAGES),
        "message_s": median_s(messages, ROUNDS, comm) / MESSAGES,
        "core_s_per_byte": median_s(both_ways, ROUNDS, comm) / LARGE,
    }
