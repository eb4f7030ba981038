"""Parameter servers beside a bare loop of MPI, and the cost of a slow worker.

Dense: 3 workers push and pull a whole model as fast as possible. Beside them, "bare": `Send` and
`Recv` of as many bytes in mpi4py; "bare, step": the same with the step of SGD on the sent model.
Goal: 0.9 with 1 server.
Slow worker: the loss of the fast workers beside a worker at a third of the speed, by mode. Goal: 5
% in "async".
Rows: of an embedding table far larger than the caches. Goal: 2 million rows a second and server, in
no more than 1.5 times the memory of rows and optimizer state.
Links (`--rate`, as root, nothing else then): the same as dense, with each worker and the server on
an emulated host with links of that rate. Goal: 0.9 of the bare loop.

Ranks that wait for a message keep a core busy now and then: with more ranks than cores, as here,
more servers can take time away from workers, and from each server.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.command_line.units import bits_per_s, rate_text

from ..on_ranks import on_hosts, on_ranks
from ..report import Report, positive
from . import dense, slow_worker, sparse

LONGER = 4  #: times as long as a case of dense are those of links and of a slow worker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, default: int, help_text: str) -> None:
        parser.add_argument(name, type=positive, default=default, help=help_text)

    sections = ", ".join(SECTIONS)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", metavar="SECTION", help=sections)
    add("--values", 1 << 20, "parameters of the model (default: 2**20)")
    add("--rows", 10**7, "of the embedding table (default: 10 million)")
    add("--batch", 1 << 16, "rows in a minibatch (default: 2**16)")
    add("--servers", 3, "at most (default: 3)")
    add("--rounds", 7, "of all cases (default: 7)")
    add("--milliseconds", 500, "of each case in a round (default: 500)")
    rates = "emulate hosts on links of 1gbit, 100mbit"
    parser.add_argument("--rate", type=bits_per_s, metavar="R", help=rates)
    add("--hosts", 4, "emulated, with the server's (default: 4)")


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
    asked = {"values": options.values, "cases": dense.cases_here(options.servers)}
    ranks = dense.WORKERS + options.servers
    updates = on_ranks(ranks, "parameter_server.dense", asked | _effort(options))
    rows = [
        (f"{name}, 32 bit, beside {peer}", ours, words, peer)
        for name, ours in (("learner.step", "learner, 1"), ("the client's push alone", "client"))
        for peer, words in (("bare", "Send and Recv"), ("bare, step", "Send, Recv and the step"))
    ]
    as_many = "Send and Recv of as many bytes"
    rows.append(("learner.step, 1 bit", "learner, 1 bit", as_many, "bare, 1 bit"))
    for n in range(2, options.servers + 1):
        name = f"learner.step, 32 bit, {n} servers"
        rows.append((name, f"learner, {n}", "1 server", "learner, 1"))
    for name, case, words, peer in rows:
        report.compare(name, updates[case], "/s", words, updates[peer], ".0f")


def _links(options: argparse.Namespace) -> Report:
    """The dense benchmark on emulated hosts: a report of its own."""
    hosts, n, rate = options.hosts, options.values, options.rate
    if hosts < 2:
        raise UserError(f"hosts={hosts} must be at least 2: a worker's and the server's")
    asked = {"values": n, "cases": dense.cases_on_hosts(hosts), **_effort(options, LONGER)}
    updates = on_hosts(hosts, rate, "parameter_server.dense", asked)
    report = Report(
        f"parameter servers: workers that push and pull {n} float32, and a server, on {hosts} "
        f"emulated hosts of this machine, links of {rate_text(rate)}"
    )
    for workers in dense.numbers(hosts):
        who = f"{workers} worker{'s' * (workers > 1)}"
        for bits in (32, 1):
            value, bare = (updates[f"{name}, {workers}, {bits}"] for name in ("learner", "bare"))
            limit = dense.limit(workers, dense.pushed_bytes(n, bits), 4 * n, rate)
            name = f"learner.step, {bits} bit, {who}"
            report.compare(name, value, "/s", "Send and Recv", bare, ".3g")
            if limit < math.inf:
                report.compare(f"{name}, beside the limit", value, "/s", "the links", limit, ".3g")
    return report


def _slow_worker(report: Report, options: argparse.Namespace) -> None:
    effort = _effort(options, LONGER)
    effort["rounds"] = -(-effort["rounds"] // 3)
    measured = on_ranks(slow_worker.WORKERS + 1, "parameter_server.slow_worker", effort)
    for mode, speeds in measured.items():
        report.add(
            f"a worker's steps beside one that is {slow_worker.SLOWER} times as slow, {mode}",
            speeds["slow"],
            "/s",
            f"all alike, {speeds['alike']:.1f}/s; the slow one has {speeds['slowest']:.1f}/s",
            speeds["slow"] / speeds["alike"],
        )


def _rows(report: Report, options: argparse.Namespace) -> None:
    asked = {"touched": options.rows, "batch": options.batch, **_effort(options)}
    measured = on_ranks(sparse.WORKERS + 1, "parameter_server.sparse", asked)
    words = {"pull": "pulled", "push": "pushed", "both": "pulled and pushed"}
    for kind, value in measured["served"].items():
        name = f"rows {words[kind]}, 1 server, {sparse.WORKERS} workers"
        bare, peer = measured["bare"][kind] / 1e6, "Send and Recv of as many bytes"
        report.compare(name, value / 1e6, "M/s", peer, bare)
    name, peer = "memory of the server's table, a row", "rows and state of Adagrad"
    report.compare(name, measured["bytes"], "B", peer, 2 * sparse.ROW, "")


def _effort(options: argparse.Namespace, longer: int = 1) -> dict[str, Any]:
    return {"rounds": options.rounds, "seconds": longer * options.milliseconds / 1e3}


SECTIONS = {"dense": _dense, "slow-worker": _slow_worker, "rows": _rows}
