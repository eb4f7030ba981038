"""Sums over emulated links beside the limit of the links."""

from __future__ import annotations

import json
from typing import Any

from parallel_sgd.command_line.cluster import BURST, payload_rate
from parallel_sgd.command_line.units import rate_text
from parallel_sgd.compression import CODE
from parallel_sgd.costs import bytes_sent

from ..on_ranks import ONE_THREAD, on_hosts
from ..report import Report
from .sums import GLOO

SIZES = (250_000, 2_500_000, 25_000_000)  #: values: 1, 10 and 100 MB of float32
RATE = 1e9
ROUNDS = 5
GOAL = 20  #: gloo's time in 32 bits over ours in 1 bit, at 100 MB

CASES: dict[str, dict[str, Any]] = {
    "32 bit, collective": {"gradient_bits": 32, "transport": "collective"},
    **{
        f"{bits} bit, pipelined": {"gradient_bits": bits, "transport": "pipelined"}
        for bits in (32, 8, 4, 2, 1, 0.5, 0.25, 0.1)
    },
    "1 bit as signs, pipelined": {"gradient_bits": 1, "transport": "pipelined", "code": "sign"},
    "1 bit, collective": {"gradient_bits": 1, "transport": "collective"},
    "auto": {"gradient_bits": "auto"},
}


def compared(count: int, rate: float, sizes: list[int], rounds: int) -> Report:
    """Return the table for `count` hosts.

    Raises:
        UserError: the hosts cannot be made, or a sum is wrong.
    """
    asked = {"sizes": sizes, "rounds": rounds, "cases": CASES, "gloo": True}
    report = Report(
        f"sums of float32 over {count} emulated hosts of this machine, a rank each, links of "
        f"{rate_text(rate)}, which take {BURST >> 10} KiB at once after a rest"
    )
    for size in on_hosts(count, rate, "exchange.sums", asked, environ=ONE_THREAD):
        values, where = size["values"], f"{size['values'] / 250_000:g} MB"
        for name, seconds in size["seconds"].items():
            options = CASES.get(name, {"gradient_bits": 32})
            bits, code = options["gradient_bits"], options.get("code", CODE)
            if name == "auto":
                plan = size["plans"][name]
                (bits,) = map(json.loads, plan["gradient_bits"])  # of one bucket
                name = f"auto: {bits} bit, {plan['transport']}"
            limit = bytes_sent(values, bits, count, code=code) / payload_rate(rate)
            row, peer = f"{where}, {name}", f"the links, {bits} bit"
            report.compare(row, 1e3 * seconds, "ms", peer, 1e3 * limit, ".3g")
        if GLOO in size["seconds"]:
            gain = size["seconds"][GLOO] / size["seconds"]["1 bit, pipelined"]
            row = f"{where}, {GLOO} over ours in 1 bit"
            report.compare(row, gain, "times", "goal at 100 MB", GOAL, "g")
    return report
