"""Sums over emulated links: both sides in turn, and the limit of the links."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.command_line.cluster import BURST, emulated_hosts, payload_rate
from parallel_sgd.compression import CODE
from parallel_sgd.costs import bytes_sent

from ..report import Report
from ..training.conductor import Conductor, conducted
from .cases import ALLREDUCE, AUTO, GLOO, OURS

SIZES = (250_000, 2_500_000, 25_000_000)  #: values: 1, 10 and 100 MB of float32
RATE = 1e9
ROUNDS = 5

GLOO_OVER_ONE_BIT, LIMIT_OF_FULL = 20, 1.1  #: goals
LARGE = 2_500_000  #: values, from which on the second one holds

ONE_BIT, FULL = "1 bit, pipelined", "32 bit, pipelined"
ROUNDING = 1e-5  #: of a sum in full precision


@dataclass
class Size:
    """The results for vectors of one size.

    Attributes:
        seconds: by case, of the slowest rank, the median over all sums.
        auto: the choice of "auto", as in `ExchangeState.report`.
    """

    values: int
    seconds: dict[str, float] = field(default_factory=dict)
    auto: dict[str, Any] = field(default_factory=dict)


def compared(count: int, rate: float, sizes: list[int], rounds: int) -> Report:
    """Return the table for `count` hosts.

    Raises:
        UserError: the hosts cannot be made, a side has ended, or a sum is wrong.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    sides = ["ours", "peer"] if has_torch else ["ours"]
    with emulated_hosts(count, rate) as hosts, conducted(hosts, sides, "exchange") as playing:
        by_size = [measured(playing, values, rounds) for values in sizes]
    return tabled(by_size, count, rate)


def measured(playing: Conductor, values: int, rounds: int) -> Size:
    """Measure all cases in turn; a first round does not count."""
    size = Size(values)
    for side in playing.connections:
        answers = playing.all(side, "begin", values=values)
        size.auto |= answers[0].get("auto", {})
    cases = dict.fromkeys((ALLREDUCE, *OURS, AUTO), "ours")
    if "peer" in playing.connections:
        cases[GLOO] = "peer"
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds + 1):
        for name, side in cases.items():
            answers = playing.all(side, "sums", name=name, times=times(values))
            require_sum(name, answers)
            if i > 0:
                by_sum = zip(*(answer["seconds"] for answer in answers), strict=True)
                seconds[name] += map(max, by_sum)
    size.seconds = {name: statistics.median(of_case) for name, of_case in seconds.items()}
    return size


def times(values: int) -> int:
    """Return the number of sums in a turn, which take about as long as its start."""
    return max(1, min(8, 10_000_000 // values))


def require_sum(name: str, answers: list[dict[str, Any]]) -> None:
    """Check the sums of all ranks.

    Raises:
        UserError: a sum in full precision is wrong, or our sums differ between ranks.
    """
    full = name in (ALLREDUCE, GLOO) or (name in OURS and OURS[name][0] == 32)
    worst = max(answer["error"] for answer in answers)
    if full and not worst < ROUNDING:
        raise UserError(f"{name} has not summed up: relative error {worst:g}")
    if name in (*OURS, AUTO) and len({answer["digest"] for answer in answers}) > 1:
        raise UserError(f"{name} has left other sums on some ranks than on others")


def tabled(sizes: list[Size], hosts: int, rate: float) -> Report:
    """Return the results beside the links' limit."""
    words = "no limit" if rate == math.inf else f"{rate / 1e9:g} Gbit/s"
    report = Report(
        f"sums of float32 over {hosts} emulated hosts of this machine, a rank each, links of "
        f"{words}, which take {BURST >> 10} KiB at once after a rest"
    )
    for size in sizes:
        _cases(report, size, hosts, rate)
    for size in sizes:
        _headlines(report, size, hosts, rate)
    if not all(GLOO in size.seconds for size in sizes):
        report.add(f"{GLOO}'s all_reduce", 0, "times", "PyTorch is not installed here", None)
    return report


def limit_s(values: int, bits: float, hosts: int, rate: float, code: str = CODE) -> float:
    """Return the seconds of a sum's bytes on a link; 0 for a link without a limit."""
    return bytes_sent(values, bits, hosts, code=code) / payload_rate(rate)


def _megabytes(size: Size) -> str:
    return f"{size.values / 250_000:g} MB"


def _cases(report: Report, size: Size, hosts: int, rate: float) -> None:
    for name, seconds in size.seconds.items():
        bits, options = OURS.get(name, (32, {}))
        if name == AUTO:
            (bits,) = map(json.loads, size.auto["gradient_bits"])  # of one bucket
            name = f"{AUTO}: {bits} bit, {size.auto['transport']}"
        limit = limit_s(size.values, bits, hosts, rate, options.get("code", CODE))
        report.add(
            f"{_megabytes(size)}, {name}",
            seconds * 1e3,
            "ms",
            f"the links, {bits} bit, {limit * 1e3:.3g} ms",
            seconds / limit if limit else None,
        )


def _headlines(report: Report, size: Size, hosts: int, rate: float) -> None:
    seconds, where = size.seconds, _megabytes(size)
    full, one_bit = seconds[FULL], seconds[ONE_BIT]
    if GLOO in seconds:
        gain, goal = seconds[GLOO] / one_bit, f"goal at 100 MB: {GLOO_OVER_ONE_BIT}"
        name = f"{where}, {GLOO} in 32 bit over ours in 1 bit"
        report.add(name, gain, "times", goal, gain / GLOO_OVER_ONE_BIT)
    limit = limit_s(size.values, 32, hosts, rate)
    if limit and size.values >= LARGE:
        ratio, goal = full / limit, f"goal: at most {LIMIT_OF_FULL}"
        report.add(f"{where}, 32 bit over the links", ratio, "times", goal, ratio / LIMIT_OF_FULL)
    best = min(OURS, key=lambda name: seconds[name])
    ratio = seconds[AUTO] / seconds[best]
    report.add(f"{where}, {AUTO} over the best", ratio, "times", f"the best: {best}", ratio)
