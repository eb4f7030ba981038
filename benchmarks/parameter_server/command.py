"""Parameter servers: what they reach of a bare loop of MPI, and what a slow worker costs.

Dense: 3 workers push and pull a whole model, each as fast as it can. Beside them, "bare": `Send`
and `Recv` of as many bytes in mpi4py; "bare, step": the same with the step of SGD on the model that
is sent; "sum": the first, and what the step takes alone, in one process. Goal: 0.9 with 1 server.
Slow worker: what the others lose where one is three times as slow, by mode. Goal: 5 % in "async".
Rows: of an embedding table that is far larger than the caches. Goal: 2 million rows a second and
server, in no more than 1.5 times the memory of rows and optimizer state.
Links (`--rate`, as root, nothing else then): the same as the first, where each worker and the
server is an emulated host on links of that rate. Goal: 0.9 of the bare loop.

Ranks that wait for a message keep a core busy now and then: with more ranks than cores, as here,
more servers can take time away from workers, and each other.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.command_line.cluster import emulated_hosts
from parallel_sgd.command_line.units import bits_per_s

from ..on_ranks import on_hosts, on_ranks
from ..report import Report, positive
from . import dense, links, slow_worker, sparse

Found = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", choices=SECTIONS, nargs="+", metavar="SECTION", help=", ".join(SECTIONS)
    )
    parser.add_argument(
        "--values", type=positive, default=1 << 20, help="parameters of the model (default: 2**20)"
    )
    parser.add_argument(
        "--rows", type=positive, default=10**7, help="of the embedding table (default: 10 million)"
    )
    parser.add_argument(
        "--batch", type=positive, default=1 << 16, help="rows in a minibatch (default: 2**16)"
    )
    parser.add_argument("--servers", type=positive, default=3, help="at most (default: 3)")
    parser.add_argument("--rounds", type=positive, default=7, help="of all cases (default: 7)")
    parser.add_argument(
        "--milliseconds", type=positive, default=500, help="of each case in a round (default: 500)"
    )
    parser.add_argument(
        "--rate", type=bits_per_s, metavar="R", help="emulate hosts on links of 1gbit, 100mbit"
    )
    parser.add_argument(
        "--hosts", type=positive, default=4, help="emulated, with the server's (default: 4)"
    )


def main(options: argparse.Namespace) -> Report:
    if options.rate is not None:
        return _links(options)
    report = Report(
        f"parameter servers: {dense.WORKERS} workers that push and pull {options.values} float32, "
        "a core's thread each, on one machine"
    )
    for section in options.only or SECTIONS:
        SECTIONS[section](report, options)
    return report


def _dense(report: Report, options: argparse.Namespace) -> None:
    n, servers = options.values, options.servers
    measured = on_ranks(
        dense.WORKERS + servers,
        "parameter_server.dense",
        {"values": n, "servers": servers, **_effort(options)},
    )
    updates, step_s = measured["updates"], measured["step_s"]
    peers = {
        "bare": ("Send and Recv", updates["bare"]),
        "bare, step": ("Send, Recv and the step", updates["bare, step"]),
        "sum": (
            f"Send and Recv, and {step_s * 1e3:.2f} ms for the step alone",
            1 / (1 / updates["bare"] + step_s),
        ),
    }
    ours = {"learner.step": updates["learner, 1"], "the client's push alone": updates["client"]}
    for name, value in ours.items():
        for peer, (words, limit) in peers.items():
            report.add(
                f"{name}, 32 bit, beside {peer}",
                value,
                "/s",
                f"{words}, {limit:.0f}/s",
                value / limit,
            )
    one_bit, bare = updates["learner, 1 bit"], updates["bare, 1 bit"]
    reference = f"Send and Recv of as many bytes, {bare:.0f}/s"
    report.add("learner.step, 1 bit", one_bit, "/s", reference, one_bit / bare)
    for bits, theory in (("32", 4 * n), ("1", dense.pushed_bytes(n))):
        sent = measured["bytes"][bits]
        reference = f"theory, {theory:,.0f} B"
        report.add(f"bytes of a push, {bits} bit", sent, "B", reference, sent / theory)
    for count in range(2, servers + 1):
        value = updates[f"learner, {count}"]
        reference = f"1 server, {updates['learner, 1']:.0f}/s"
        ratio = value / updates["learner, 1"]
        report.add(f"learner.step, 32 bit, {count} servers", value, "/s", reference, ratio)
    for name, seconds in measured["where"].items():
        report.add(f"of a learner.step: {name}", seconds * 1e3, "ms", "1 server, 32 bit", None)


def _links(options: argparse.Namespace) -> Report:
    """The dense benchmark on emulated hosts: a report of its own."""
    hosts, n, rate = options.hosts, options.values, options.rate
    if hosts < 2:
        raise UserError(f"hosts={hosts} must be at least 2: a worker's and the server's")
    effort = _effort(options)
    effort["seconds"] *= links.LONGER
    with emulated_hosts(hosts, rate) as emulated:
        measured = on_hosts(emulated, "parameter_server.links", {"values": n, **effort})
    report = Report(
        f"parameter servers: workers that push and pull {n} float32, and a server, on {hosts} "
        f"emulated hosts of this machine, links of {rate / 1e9:g} Gbit/s"
    )
    for workers in links.numbers(hosts):
        who = f"{workers} worker{'s' * (workers > 1)}"
        for bits, pushed in ((32, 4 * n), (1, dense.pushed_bytes(n))):
            value = measured["updates"][f"learner, {workers}, {bits}"]
            bare = measured["updates"][f"bare, {workers}, {bits}"]
            limit = links.limit(workers, pushed, 4 * n, rate)
            name = f"learner.step, {bits} bit, {who}"
            report.add(name, value, "/s", f"Send and Recv, {bare:.3g}/s", value / bare)
            if limit == math.inf:
                continue
            reference = f"the links, {limit:.3g}/s"
            report.add(f"{name}, beside the limit", value, "/s", reference, value / limit)
            report.add(f"Send and Recv, {bits} bit, {who}", bare, "/s", reference, bare / limit)
        for name, seconds in measured["where"][str(workers)].items():
            report.add(f"of a learner.step: {name}, {who}", seconds * 1e3, "ms", "32 bit", None)
    return report


def _slow_worker(report: Report, options: argparse.Namespace) -> None:
    effort = _effort(options)
    effort = {"rounds": -(-effort["rounds"] // 3), "seconds": 4 * effort["seconds"]}
    measured = on_ranks(slow_worker.WORKERS + 1, "parameter_server.slow_worker", effort)
    for mode in slow_worker.MODES:
        speeds = measured[mode]
        report.add(
            f"a worker's steps beside one that is {slow_worker.SLOWER} times as slow, {mode}",
            speeds["slow"],
            "/s",
            f"all alike, {speeds['alike']:.1f}/s; the slow one has {speeds['slowest']:.1f}/s",
            speeds["slow"] / speeds["alike"],
        )
    for mode in slow_worker.MODES:
        name = f"mean staleness beside a slow worker, {mode}"
        report.add(name, measured[mode]["staleness"], "updates", "all pushes", None)


def _rows(report: Report, options: argparse.Namespace) -> None:
    measured = on_ranks(
        sparse.WORKERS + 1,
        "parameter_server.sparse",
        {"touched": options.rows, "batch": options.batch, **_effort(options)},
    )
    words = {"pull": "pulled", "push": "pushed", "both": "pulled and pushed"}
    rows = f"of {options.rows / 1e6:g} million, width {sparse.WIDTH}"
    for kind, access in (("pull", "read"), ("push", "read, changed and written")):
        alone, memory = measured["table"][kind] / 1e6, measured["random"][kind] / 1e6
        reference = f"rows {access} at random in one array, {memory:.1f} M/s"
        report.add(f"rows {words[kind]} {rows}, no server", alone, "M/s", reference, alone / memory)
    for case, value in measured["served"].items():
        count, kind = case.split()
        served, bare = value / 1e6, measured["bare"][case] / 1e6
        report.add(
            f"rows {words[kind]}, 1 server, {count} worker{'s' * (count != '1')}",
            served,
            "M/s",
            f"Send and Recv of as many bytes, {bare:.1f} M/s",
            served / bare,
        )
    least = 2 * sparse.ROW
    reference = f"rows and state of Adagrad, {least} B"
    nbytes = measured["bytes"]
    report.add("memory of the server's table, a row", nbytes, "B", reference, nbytes / least)


def _effort(options: argparse.Namespace) -> dict[str, Any]:
    return {"rounds": options.rounds, "seconds": options.milliseconds / 1e3}


SECTIONS = {"dense": _dense, "slow-worker": _slow_worker, "rows": _rows}
