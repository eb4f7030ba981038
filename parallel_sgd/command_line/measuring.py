"""The options of a training run that show where its time goes."""

from __future__ import annotations

import argparse


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where the time goes")
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="write what each rank and thread did when (compute, encode, wire, decode, wait ...), "
        "all on one clock: a JSON file for https://ui.perfetto.dev or chrome://tracing. Also where "
        "training ends with an error of all ranks, but not with --algorithm async",
    )
    group.add_argument(
        "--sync-perf-stats",
        type=int,
        default=0,
        metavar="N",
        help="after every N synchronizations of all ranks print samples and bytes a second, and "
        "how long compute, aggregation and update took for each (default: 0, never)",
    )
