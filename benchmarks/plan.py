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

from parallel_sgd.command_line.cluster import emulated_hosts, payload_rate
from parallel_sgd.command_line.units import bits_per_s
from parallel_sgd.compression import registered_bits
from parallel_sgd.costs import Link, exchange_s, measure_kernel_speeds
from parallel_sgd.launcher.cores import usable_cores

from .on_ranks import on_hosts
from .report import Report, positive

MEGABYTES = (1, 10, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--hosts",
        type=positive,
        nargs="+",
        default=[2, 3, 4, 8],
        metavar="K",
        help="(default: 2 3 4 8)",
    )
    add("--rate", type=bits_per_s, default=1e9, help="of every link (default: 1gbit)")
    add(
        "--bits",
        type=json.loads,
        nargs="+",
        choices=registered_bits(),
        default=[32, 4, 1],
        metavar="B",
        help="(default: 32 4 1)",
    )
    add(
        "--megabytes",
        type=positive,
        nargs="+",
        default=MEGABYTES,
        metavar="MB",
        help="of float32 (default: 1 10 100)",
    )
    add(
        "--transport",
        choices=("auto", "collective", "pipelined"),
        default="auto",
        help="of the exchanges (default: auto)",
    )


def main(options: argparse.Namespace) -> Report:
    link = measured_link(options.rate)
    speeds = measure_kernel_speeds()
    sizes = [mb * 250_000 for mb in options.megabytes]
    report = Report(
        f"exchanges on emulated hosts, links of {options.rate / 1e9:g} Gbit/s, measured against "
        f"predicted; {usable_cores()} cores"
    )
    report.add("latency of a message", link.latency_s * 1e6, "us", "two hosts", None)
    report.add("a core's time for a message", link.message_s * 1e6, "us", "two hosts", None)
    report.add("a core's time for a megabyte", link.core_s_per_byte * 1e12, "us", "two hosts", None)
    errors = []
    for count in options.hosts:
        with emulated_hosts(count, options.rate) as hosts:
            asked = {"sizes": sizes, "bits": options.bits, "transport": options.transport}
            measured = on_hosts(hosts, "plan_ranks", asked)
        for exchange in measured:
            predicted = exchange_s(
                exchange["values"],
                exchange["bits"],
                count,
                link,
                speeds,
                cores_per_rank=usable_cores() / count,
                pipelined=exchange["pipelined"],
            ).total_s
            error = predicted / exchange["seconds"] - 1
            errors.append(abs(error))
            report.add(
                f"{count} hosts, {exchange['values'] / 250_000:g} MB, {exchange['bits']} bit",
                exchange["seconds"] * 1e3,
                "ms",
                f"predicted, {predicted * 1e3:.2f} ms, error {error:+.0%}",
                exchange["seconds"] / predicted,
            )
    report.add("largest error", 100 * max(errors), "%", "aim: 15 %", max(errors) / 0.15)
    middle = statistics.median(errors)
    report.add("median error", 100 * middle, "%", "aim: 15 %", middle / 0.15)
    return report


def measured_link(rate: float) -> Link:
    """What two hosts find of messages and bytes; the rate is as given."""
    with emulated_hosts(2, math.inf) as hosts:
        fields = on_hosts(hosts, "plan_link", {})
    return Link(bytes_per_s=payload_rate(rate), **fields)
