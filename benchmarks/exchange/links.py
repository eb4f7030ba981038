"""Sums over emulated links: gloo's, MPI's and ours in turn, and the limit of the links."""

from __future__ import annotations

import importlib.util
import json
import statistics
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_sgd import Communicator, Parameters, UserError
from parallel_sgd.algorithms import ExchangeState
from parallel_sgd.command_line.cluster import BURST, payload_rate
from parallel_sgd.command_line.units import rate_text
from parallel_sgd.compression import CODE
from parallel_sgd.costs import bytes_sent
from parallel_sgd.exchange import ExchangeOptions

from ..on_ranks import ONE_THREAD, on_hosts, process_group
from ..report import Report
from ..timing import seconds_of

Array = npt.NDArray[np.float32]

SIZES = (250_000, 2_500_000, 25_000_000)  #: values: 1, 10 and 100 MB of float32
RATE = 1e9
ROUNDS = 5
TIMEOUT_S = 4 * 3600.0
GOAL = 20  #: gloo's time in 32 bits over ours in 1 bit, at 100 MB

ALLREDUCE, GLOO, AUTO = "MPI_Allreduce", "gloo", "auto"
BITS = (32, 8, 4, 2, 1, 0.5, 0.25, 0.1)

#: Bits of ours, and the other options of its exchange.
OURS: dict[str, tuple[float, dict[str, str]]] = {
    "32 bit, collective": (32, {"transport": "collective"}),
    **{f"{bits} bit, pipelined": (bits, {"transport": "pipelined"}) for bits in BITS},
    "1 bit as signs, pipelined": (1, {"transport": "pipelined", "code": "sign"}),
    "1 bit, collective": (1, {"transport": "collective"}),
}

CHECKED = 1024  #: values of a sum that are compared with the exact one
ROUNDING = 1e-5  #: of a sum in full precision


def compared(count: int, rate: float, sizes: list[int], rounds: int) -> Report:
    """Return the table for `count` hosts.

    Raises:
        UserError: the hosts cannot be made, or a sum is wrong.
    """
    asked = {"sizes": sizes, "rounds": rounds}
    how: dict[str, Any] = {"environ": ONE_THREAD, "timeout_s": TIMEOUT_S}
    measured = on_hosts(count, rate, "exchange.links", asked, **how)
    report = Report(
        f"sums of float32 over {count} emulated hosts of this machine, a rank each, links of "
        f"{rate_text(rate)}, which take {BURST >> 10} KiB at once after a rest"
    )
    for size in measured:
        add_rows(report, count, rate, **size)
    return report


def add_rows(
    report: Report,
    hosts: int,
    rate: float,
    values: int,
    seconds: dict[str, float],
    auto: dict[str, Any],
) -> None:
    """Add the results for vectors of a size: what `measure` returns, beside the links' limit."""
    where = f"{values / 250_000:g} MB"
    for name, taken in seconds.items():
        bits, options = OURS.get(name, (32, {}))
        if name == AUTO:
            (bits,) = map(json.loads, auto["gradient_bits"])  # of one bucket
            name = f"{AUTO}: {bits} bit, {auto['transport']}"
        sent = bytes_sent(values, bits, hosts, code=options.get("code", CODE))
        limit, row = 1e3 * sent / payload_rate(rate), f"{where}, {name}"
        report.compare(row, 1e3 * taken, "ms", f"the links, {bits} bit", limit, ".3g")
    if GLOO in seconds:
        gain, name = seconds[GLOO] / seconds["1 bit, pipelined"], f"{GLOO} over ours in 1 bit"
        report.compare(f"{where}, {name}", gain, "times", "goal at 100 MB", GOAL, "g")


def measure(comm: Communicator, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return for each size, of vectors with so many "values", the "seconds" of each case, of the
    slowest rank, medians of all sums; and the choice of "auto". With gloo where PyTorch is."""
    with_gloo = importlib.util.find_spec("torch") is not None
    with process_group(comm, with_gloo):
        return [measure_size(comm, values, rounds, with_gloo) for values in sizes]


def measure_size(comm: Communicator, values: int, rounds: int, with_gloo: bool) -> dict[str, Any]:
    """Measure all cases in turn; a first round does not count."""
    parameters = Parameters({"W": _vector_of(comm.rank, values)})
    total = parameters.like().flat
    calls, auto = _calls(comm, parameters, total, with_gloo)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            of_turn = turn(comm, name, call, parameters.flat, total)
            seconds[name] += of_turn if i > 0 else []
    medians = {name: statistics.median(of_case) for name, of_case in seconds.items()}
    return {"values": values, "seconds": medians, "auto": auto}


def _calls(
    comm: Communicator, parameters: Parameters, total: Array, with_gloo: bool
) -> tuple[dict[str, Callable[[], object]], dict[str, Any]]:
    """Return each case's sum over the ranks of `total` in place; and the choice of "auto"."""
    from mpi4py import MPI

    calls: dict[str, Callable[[], object]] = {
        ALLREDUCE: lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total)
    }
    given: dict[str, dict[str, Any]] = {
        name: {"gradient_bits": bits, **options} for name, (bits, options) in OURS.items()
    }
    for name, options in {**given, AUTO: {"gradient_bits": AUTO}}.items():
        exchange = ExchangeState.init(ExchangeOptions(**options), parameters, lambda: 0, comm)
        calls[name] = partial(exchange.sum, total)
    if with_gloo:
        import torch

        calls[GLOO] = partial(torch.distributed.all_reduce, torch.from_numpy(total))
    return calls, exchange.report() or {}


def turn(
    comm: Communicator, name: str, call: Callable[[], object], given: Array, total: Array
) -> list[float]:
    """Return the seconds of each sum, of the slowest rank.

    The first one is not counted: TCP still has the rate of the case before, and takes a while to
    recover from lost packets.

    Args:
        given: this rank's vector.
        total: room for the sum; gets the vector before each call.
    Raises:
        UserError: a sum in full precision is wrong, or our sums differ between ranks.
    """
    seconds = []
    for _ in range(1 + times(len(total))):
        total[...] = given
        seconds.append(seconds_of(call, comm))
    few = min(CHECKED, len(total))
    exact = np.sum([_vector_of(rank, few) for rank in range(comm.size)], axis=0, dtype=np.float64)
    error = np.abs(total[:few] - exact).max() / np.abs(exact).max()
    digest = zlib.crc32(total[:: 1 + total.size // 100_000].tobytes())
    errors, digests = zip(*comm.allgather_object((float(error), digest)), strict=True)
    full = name in (ALLREDUCE, GLOO) or (name in OURS and OURS[name][0] == 32)
    if full and not max(errors) < ROUNDING:
        raise UserError(f"{name} has not summed up: relative error {max(errors):g}")
    if name in (*OURS, AUTO) and len(set(digests)) > 1:
        raise UserError(f"{name} has left other sums on some ranks than on others")
    return seconds[1:]


def times(values: int) -> int:
    """Return the number of sums in a turn, which take about as long as its start."""
    return max(1, min(8, 10_000_000 // values))


def _vector_of(rank: int, values: int) -> Array:
    """Return a rank's addend."""
    return np.random.default_rng(rank).standard_normal(values, np.float32)
