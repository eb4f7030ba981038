"""Estimate each algorithm's time on a cluster, and recommend an algorithm: `parallel-sgd plan`.

Nothing is trained, and no further rank is needed. The estimate uses the cost model of
docs/planning.md with the speed of this machine's kernels, measured on the spot.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..argument_parser import Parser
from ..costs import KernelSpeeds, Link, measure_kernel_speeds
from ..errors import UserError
from ..files import require_place, write_whole
from ..optimizers import OPTIMIZERS
from ..parameters import Parameters
from ..planning import (
    Candidate,
    Job,
    Recommendation,
    candidate_of,
    candidates,
    learn_alike,
    reached,
    recommend,
    sensitivity,
    title,
)
from ..planning.candidates import Servers
from ..planning.figure import draw
from ..training import require_matplotlib
from ..validation import require_use, shown
from .past_run import PastRun
from .plan_text import NODES, TERMS, job_text, samples_per_s, servers_text, speeds_text, table
from .train.arguments import given_as_config
from .train.config import toml
from .units import bits_per_s, count, seconds

PLAN_ERROR = 0.25  #: of predicted seconds: of 10 MB and more, 22 of 24 errors in docs/planning.md
MAXIMA = {"nodes": 1 << 20, "ranks_per_node": 1024, "parameters": 10**13, "minibatch": 10**9}


def main(argv: Sequence[str]) -> int:
    """Run `parallel-sgd plan`, and return 0."""
    args = _parser().parse_args(argv)
    runs = _runs(args)
    for name, most in MAXIMA.items():
        if getattr(args, name) > most:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag}={getattr(args, name)} must be at most {most}")
    for name in ("config", "json", "figure"):
        if (path := getattr(args, name)) is not None:
            require_place(f"--{name}", path)
    pyplot = None if args.figure is None else _pyplot()
    figure_format = "" if args.figure is None else _figure_format(args.figure)
    job = _job(args, measure_kernel_speeds())
    estimates = candidates(job)
    print(f"{job_text(job)}\n{speeds_text(job)}\n")
    print(table(estimates, job) + servers_text(estimates, job))
    recommended = recommend(job)
    print(f"\n{recommended.reason}\ntrain.py {recommended.options}")
    for how, other in sensitivity(job, recommended.choice):
        print(f"(If kernels were {how} as they were here just now: {title(other)}.)")
    if runs.curve is not None:
        print(_seconds_to_loss(runs.curve, args.target_loss, estimates, job))
    if runs.compared is not None:
        print(_comparison(runs.compared, job))
    if args.json is not None:
        text = json.dumps(_content(args, job), indent=2, allow_nan=False)
        write_whole("--json", args.json, lambda path: path.write_text(text + "\n"))
    if args.figure is not None:
        described = job_text(job)
        write_whole(
            "--figure",
            args.figure,
            lambda path: draw(path, figure_format, NODES, job, described, pyplot),
        )
    if args.config is not None:
        content = _config_text(recommended, job, args.optimizer)
        write_whole("--config", args.config, lambda path: path.write_text(content))
        print(_next_text(args.config, job))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="parallel-sgd plan",
        description="Estimate the cost of every algorithm for a model on a cluster, and recommend "
        "one. docs/planning.md explains the cost model; kernels are timed on this machine.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=count, metavar="N", help="number of machines (default: of a RUN)")
    add(
        "--bandwidth",
        type=bits_per_s,
        required=True,
        metavar="RATE",
        help="rate of every node's link, in each direction: 10gbit, 100mbit, unlimited",
    )
    add(
        "--latency",
        type=seconds,
        required=True,
        metavar="TIME",
        help="time of a small message, one way: 30us, 1ms",
    )
    add(
        "--parameters",
        type=count,
        metavar="N",
        help="number of parameters of the model: 60M (default: of a RUN)",
    )
    add(
        "--step-time",
        type=seconds,
        required=True,
        metavar="TIME",
        help="time of one rank alone for its part of a minibatch: 0.2, 50ms",
    )
    add("--ranks-per-node", type=count, default=1, metavar="N", help="(default: 1)")
    add(
        "--minibatch",
        type=count,
        metavar="N",
        help="samples of each rank in a step (default: as many as make a RUN's minibatch, or 64)",
    )
    add("--optimizer", choices=OPTIMIZERS, default="momentum", help="(default: momentum)")
    add(
        "--curve",
        metavar="RUN",
        help="the folder of an earlier run: with --target-loss, predict seconds to this loss",
    )
    add("--target-loss", type=float, metavar="L", help="validation (or test) loss to reach")
    add(
        "--compare",
        metavar="RUN",
        help="the folder of a run on this cluster: say how wrong the plan was",
    )
    add("--config", metavar="FILE", help="write the recommended options as TOML, for train.py FILE")
    add("--json", metavar="FILE", help="write the whole plan as JSON, for 1 to 1,024 nodes")
    add("--figure", metavar="FILE", help="draw the efficiency on 1 to 1,024 nodes (PNG, SVG, PDF)")
    return parser


class _Runs(NamedTuple):
    curve: PastRun | None
    compared: PastRun | None


def _runs(args: argparse.Namespace) -> _Runs:
    """Read the runs named by the arguments, and complete the arguments by them.

    Raises:
        UserError: a run or an argument is not as required, or an argument is missing.
    """
    require_use("--target-loss", args.target_loss, None, args.curve is not None, "--curve RUN")
    require_use("--curve", args.curve, None, args.target_loss is not None, "--target-loss L")
    curve = None if args.curve is None else PastRun.read("--curve", args.curve)
    compared = None if args.compare is None else PastRun.read("--compare", args.compare)
    run = compared or curve
    if run is not None:
        workers = run.trainers // args.ranks_per_node
        args.nodes = args.nodes or max(1, workers)
        args.parameters = args.parameters or run.parameters
        ranks = args.nodes * args.ranks_per_node
        args.minibatch = args.minibatch or max(1, run.minibatch // ranks)
    args.minibatch = args.minibatch or 64
    for name in ("nodes", "parameters"):
        if getattr(args, name) is None:
            raise UserError(f"--{name} N is required without --curve RUN or --compare RUN")
    samples = args.nodes * args.ranks_per_node * args.minibatch
    for flag, one in (("--curve", curve), ("--compare", compared)):
        if one is not None and one.minibatch != samples:
            raise UserError(
                f"{flag}={shown(str(one.folder))} has minibatches of {one.minibatch} samples of "
                f"all ranks, but this plan's have {samples}: give another --minibatch"
            )
    return _Runs(curve, compared)


def _job(args: argparse.Namespace, speeds: KernelSpeeds) -> Job:
    single = Parameters({"W": np.zeros(1, np.float32)})
    return Job(
        nodes=args.nodes,
        ranks_per_node=args.ranks_per_node,
        link=Link.ethernet(args.bandwidth, args.latency),
        parameters=args.parameters,
        step_s=args.step_time,
        minibatch=args.minibatch,
        optimizer_vectors=len(OPTIMIZERS[args.optimizer](lr=0.1).init(single).buffers),
        speeds=speeds,
    )


def _config_text(recommended: Recommendation, job: Job, optimizer: str) -> str:
    """Return the recommended options as a file for train.py.

    The minibatch and the optimizer are comments: a learning rate must be chosen with them.
    """
    assumed = {"minibatch_size": job.ranks * job.minibatch, "optimizer": optimizer}
    heading = [
        f"Planned for {job_text(job)}.",
        "The plan also assumed this. Remove the #, and add a learning rate (lr) for it:",
        *(f"{name} = {toml(value)}" for name, value in assumed.items()),
    ]
    return given_as_config(shlex.split(recommended.options), heading=heading)


def _next_text(config: str, job: Job) -> str:
    """Return the next command, for a newcomer."""
    ranks = "--hostfile hosts" if job.nodes > 1 else f"-n {job.ranks}"
    return (
        f"\n{config} has these options. Next, check the machines, and write a job script:\n"
        f"parallel-sgd doctor {ranks} --job job.sh train.py {shlex.quote(config)}"
    )


def _seconds_to_loss(run: PastRun, loss: float, estimates: Sequence[Candidate], job: Job) -> str:
    """Return the seconds to a loss by every candidate that learns as the run did."""
    own = _candidate_of("--curve", run, job)
    found = reached(run.points, loss)
    if found is None:
        lowest = min((value for _, value in run.points), default=math.nan)
        raise UserError(
            f"--target-loss={loss:g} must be a loss that the run has reached: its lowest "
            f"{run.loss.replace('_', ' ')} is {lowest:.4g}"
        )
    samples = [bound / run.minibatch for bound in found]
    lines = [
        f"\nto a {run.loss.replace('_', ' ')} of {loss:g}, by the curve of {run.folder} "
        f"({title(own)}, minibatches of {run.minibatch:,}): {_interval(*found, ',.0f')} samples"
    ]
    alike = [one for one in (own, *estimates) if learn_alike(one, own)]
    for candidate in dict.fromkeys(alike):
        step_s = candidate.cost(job).total_s
        first_s, last_s = (bound * step_s for bound in samples)
        seconds = _interval(first_s * (1 - PLAN_ERROR), last_s * (1 + PLAN_ERROR), ",.3g")
        lines.append(f"  {title(candidate):32} {seconds} s ({step_s * 1e3:,.3g} ms a step)")
    return "\n".join(lines)


def _interval(first: float, last: float, form: str) -> str:
    if last == math.inf:
        return f"at least {first:{form}}"
    return f"{first:{form}} to {last:{form}}"


def _comparison(run: PastRun, job: Job) -> str:
    """Return a line with the measured and the predicted time of a run's step."""
    own = _candidate_of("--compare", run, job)
    if run.step_s is None:
        raise UserError(
            f"--compare={shown(str(run.folder))} has a single row: steps are timed between rows"
        )
    predicted_s = own.cost(job).total_s
    return (
        f"\n{run.folder}: {title(own)} on {run.trainers} ranks took {run.step_s * 1e3:,.3g} ms a "
        f"step; predicted {predicted_s * 1e3:,.3g} ms ({predicted_s / run.step_s - 1:+.0%})"
    )


def _candidate_of(flag: str, run: PastRun, job: Job) -> Candidate:
    candidate = candidate_of(run.algorithm, job)
    if candidate is None:
        raise UserError(
            f"{flag}={shown(str(run.folder))} was trained by {type(run.algorithm).__name__}, with "
            "options for which there is no plan: plans need a fixed number of bits"
        )
    return candidate


def _row(candidate: Candidate, job: Job) -> dict[str, Any]:
    cost = candidate.cost(job)
    row = {
        "algorithm": candidate.name,
        "bits": candidate.bits,
        "seconds": {
            **{name: getattr(cost, f"{name}_s") for name in TERMS},
            "step": cost.total_s,
        },
        "speed_up": cost.efficiency * job.nodes,
        "efficiency": cost.efficiency,
        "samples_per_s": samples_per_s(candidate, job),
        "memory_bytes": candidate.memory(job),
    }
    if isinstance(candidate, Servers):
        row |= {
            "servers": candidate.servers(job),
            "server_memory_bytes": candidate.server_memory(job),
        }
    return row


def _content(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Return the whole plan in a form for JSON; an unlimited rate is null."""
    speeds, recommended = job.speeds, recommend(job)
    here = args.nodes
    return {
        "job": {
            name: None if value == math.inf else value
            for name, value in vars(args).items()
            if name not in ("config", "json", "figure", "compare")
        },
        "values_per_s": {
            name: {str(bits): None if v == math.inf else v for bits, v in by_bits.items()}
            for name, by_bits in speeds.values_per_s.items()
        },
        "step_search_s": speeds.searches_as_dict(),
        "recommended": {
            "algorithm": recommended.choice.name,
            "bits": recommended.choice.bits,
            "options": recommended.options,
            "reason": recommended.reason,
        },
        "plan": [
            {"nodes": nodes, "algorithms": [_row(candidate, on) for candidate in candidates(on)]}
            for nodes in sorted({here, *NODES})
            for on in [job.on(nodes)]
        ],
    }


def _figure_format(path: str) -> str:
    """Return the format of a figure, by its file name. Raise a UserError if Matplotlib lacks it."""
    figure_format = os.path.splitext(path)[1].removeprefix(".").lower() or "png"
    canvas = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase
    known = sorted(canvas.get_supported_filetypes())
    if figure_format not in known:
        raise UserError(f"--figure={path} must end in one of {', '.join(known)}")
    return figure_format


def _pyplot() -> Any:
    try:
        return require_matplotlib()
    except UserError as error:
        raise UserError(
            "--figure needs matplotlib: pip install '.[train]' from the checkout"
        ) from error
