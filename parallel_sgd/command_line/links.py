"""Measure the links between ranks, and show the choices of "auto": `parallel-sgd info --links`.

Ranks started by mpiexec measure themselves. Without mpiexec, `parallel-sgd run` starts ranks that
run this module and print the result as a line of JSON.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import numpy as np

from ..communication import Communicator
from ..communication.job_environment import launched_size, launcher_name
from ..compression import registered_bits
from ..costs import measure
from ..errors import UserError
from ..exchange import choose_plan, topology_for
from ..exchange.plan import try_transports
from ..launcher import add_ranks
from ..parameters import Parameters
from .on_ranks import answer, ask_ranks, slots_of

SIZES = (250_000, 2_500_000, 25_000_000)  #: values: 1, 10 and 100 MB of float32
MAX_SECONDS = 5.0  #: exchanges predicted to take longer are not tried
DEFAULT_RANKS = 2  #: ranks to start if no number is given


def add_link_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "links",
        "the speed of exchanges between ranks, and the transport and gradient bits chosen by auto",
    )
    add = group.add_argument
    add(
        "--links",
        action="store_true",
        help="measure on the ranks started by mpiexec, or else on ranks started now",
    )
    add_ranks(
        add,
        f"the number of ranks to start (default: {DEFAULT_RANKS}, or one for each slot of the "
        "hostfile)",
    )
    add("--hostfile", metavar="FILE", help="file of hosts, as for `parallel-sgd run`")


def require_link_options(args: argparse.Namespace) -> None:
    """Raise a UserError if an option has no use, or if there are too few ranks. Local."""
    launched = launched_size()
    for flag, value in (("-n", args.ranks), ("--hostfile", args.hostfile)):
        if value is not None and not args.links:
            raise UserError(f"{flag} {value} needs --links")
        if value is not None and launched is not None:
            raise UserError(
                f"{flag} {value} must not be given if {launcher_name()} has started the ranks: its "
                f"{launched} ranks are measured"
            )
    if args.links and (launched == 1 or args.ranks == 1):
        raise UserError("--links needs 2 ranks or more, but there is 1")


def measure_links(args: argparse.Namespace) -> dict[str, Any]:
    """Return the measurements of the ranks. Collective if started by mpiexec: use `abort_on_error`.

    Raises:
        UserError: the ranks could not be started, or ended with an error.
    """
    if launched_size() is not None:
        return measure_on(Communicator.world())
    ranks = args.ranks or slots_of(args.hostfile) or DEFAULT_RANKS
    if ranks < 2:
        raise UserError(f"--hostfile {args.hostfile} has 1 slot, and --links needs 2 ranks: -n 2")
    measured = ask_ranks(__name__, ranks, args.hostfile)
    if isinstance(measured, int):
        raise UserError(
            f"--links: {ranks} ranks ended with exit code {measured}; their errors are above"
        )
    return measured


def measure_on(comm: Communicator) -> dict[str, Any]:
    """Measure on the ranks of a communicator.

    The result is the same on all ranks, in a form for JSON.

    Collective. Cost: some seconds, mainly for four trials of each exchange.
    """
    topology = topology_for(comm.hosts, "auto")
    measured = measure(comm, topology.hosts)
    exchanges = []
    for values in SIZES:
        predicted = {str(b): measured.seconds(values, b) for b in reversed(registered_bits())}
        tried = None
        if predicted["32"] < MAX_SECONDS:
            tried = try_transports(comm, values, rounds=1, topology=topology)
        parameters = Parameters({"W": np.zeros(values, np.float32)})
        plan = choose_plan(parameters, comm, "auto", "auto")
        exchanges.append(
            {
                "values": values,
                "transport": plan.transport,
                "hierarchical": plan.topology.hierarchical,
                "seconds": tried,
                "gradient_bits": measured.best_bits(values),
                "predicted_s": predicted,
            }
        )
    return {
        "ranks": comm.size,
        "hosts": dict(Counter(comm.hosts)),
        **measured.as_dict(),
        "exchanges": exchanges,
    }


def link_lines(measured: dict[str, Any]) -> dict[str, str]:
    """Return the section on links as lines of text."""
    hosts = [f"{name} ({n})" if n > 1 else name for name, n in measured["hosts"].items()]
    rate, latency = measured["link"]["bytes_per_s"], measured["link"]["latency_s"]
    where = "slowest link" if len(hosts) > 1 else "memory between ranks"
    speeds = measured["values_per_s"]
    kernels = [
        f"{bits} bit {encode / 1e9:.2g}, {speeds['decode'][bits] / 1e9:.2g}"
        for bits, encode in speeds["encode"].items()
    ]
    lines = {
        "ranks": f"{measured['ranks']} on {len(hosts)} host{'s' * (len(hosts) > 1)}: "
        + ", ".join(hosts),
        where: f"{rate / 1e6:,.4g} MB/s each way, {latency * 1e6:,.3g} us",
        "encode, decode": f"G values/s of the first rank: {'; '.join(kernels)}",
    }
    for exchange in measured["exchanges"]:
        among = ", ranks of a host first among themselves" if exchange["hierarchical"] else ""
        tried = f"not tried, as the prediction is more than {MAX_SECONDS:g} s"
        if exchange["seconds"]:
            tried = ", ".join(f"{name} {_ms(s)}" for name, s in exchange["seconds"].items())
        predicted = [f"{bits} bit {_ms(s)}" for bits, s in exchange["predicted_s"].items()]
        lines[f"{exchange['values'] / 250_000:g} MB of float32"] = (
            f"transport auto: {exchange['transport']}{among}; 32 bit, {tried}\n"
            f"gradient bits auto: {exchange['gradient_bits']}\n"
            f"predicted: {', '.join(predicted)}"
        )
    return lines


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:,.3g} ms"


if __name__ == "__main__":
    answer(lambda: measure_on(Communicator.world()))
