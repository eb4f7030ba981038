"""Speed-up against accuracy, and samples a second against workers: the two figures of the papers.

After Chen and Huo (ICASSP 2016), with the speed-up of block momentum beside its accuracy, and Seide
et al. (Interspeech 2014), with samples a second. All algorithms, on 1 to 8 emulated hosts with
limited links, a worker on each, and a further host for the asynchronous algorithm's server; and on
up to 64 by the cost model of `parallel-sgd plan`.

Speed and accuracy are measured apart:

  speed     exchanges, compression and updates run on real links. Computing the gradient is a wait
            of the time of a core, since the hosts share this machine's cores. With more hosts than
            cores, waits are longer and links slower by as many times, and the seconds are divided
            by the same factor: so each host has a core for its exchange.
  accuracy  the model is trained with as many workers as threads of one process, on the same number
            of samples for all, with a learning rate tuned for each on another seed.

Peak speed-up is that of the best round's steps; average that of a whole training: a start, all
steps, eight evaluations (of a part of the test set on every worker), and an end. Each round times
start, an eighth of the steps, an evaluation and the end. Both against serial SGD: a single worker
in 32 bits. Minibatches have 256 samples of each worker. Local updates have blocks
of 8 of them, asynchronous workers push every 4.

Needs root, and Open MPI or MPICH as `parallel-sgd cluster` does; speeds need a quiet machine.
`--table FILE` measures nothing, and prints and draws an earlier run's JSON.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.command_line.units import bits_per_s
from parallel_sgd.costs import measure_kernel_speeds
from parallel_sgd.launcher.host_resources import usable_cores

from ..plan import measured_link
from ..report import Report, load, positive, table
from .contenders import BATCH, CONTENDERS, PERIOD, TITLE
from .figures import draw
from .learning import learn_all
from .results import Results, Spread, predict
from .step_times import alone, part_steps, time_all

SAMPLES = 163_840
EVALUATIONS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--hosts",
        type=positive,
        nargs="+",
        default=[1, 2, 4, 8],
        metavar="K",
        help="workers; 1 is always among them (default: 1 2 4 8)",
    )
    add("--rate", type=bits_per_s, default=1e9, help="of every link (default: 1gbit)")
    add("--rounds", type=positive, default=3, help="of all speeds (default: 3)")
    add("--seeds", type=positive, default=3, help="of all accuracies (default: 3)")


def read(options: argparse.Namespace) -> Summary:
    return Summary(load(options.table, Results))


def main(options: argparse.Namespace) -> Summary:
    workers, cores = sorted({1, *options.hosts}), usable_cores()
    if (most := max(workers)) * BATCH * PERIOD > SAMPLES:
        raise UserError(f"hosts={most} must be at most {SAMPLES // (BATCH * PERIOD)}: a block each")
    asked = {
        "hosts": workers,
        "rate": None if options.rate == math.inf else options.rate,  # JSON has no infinity
        "rounds": options.rounds,
        "seeds": options.seeds,
        "samples": SAMPLES,
        "evaluations": EVALUATIONS,
        "task": TITLE,
    }
    results = Results(asked, alone())
    link, speeds = measured_link(options.rate), measure_kernel_speeds()
    for k in workers:
        _say(f"speeds with {k} worker{'s' * (k > 1)}")
        results.timed += time_all(
            *(CONTENDERS, k, options.rate, results.alone, cores),
            rounds=options.rounds,
            steps=part_steps(SAMPLES, EVALUATIONS, k),
        )
    step_s = statistics.median_high(results.serial.step_s)
    results.predicted += predict(workers, step_s, link, speeds)
    _say("accuracies")
    results.learned += learn_all(CONTENDERS, workers, SAMPLES, options.seeds, cores)
    return Summary(results)


def _say(what: str) -> None:
    print(f"speedup: {what}", file=sys.stderr, flush=True)


class Summary(Report):
    """A table, a JSON file and a figure of the results."""

    def __init__(self, results: Results) -> None:
        super().__init__(f"Speed-up over serial SGD and what is learned: {TITLE}, {results.rate}")
        self.results, self.machine = results, results.machine

    def print(self) -> None:
        """Print medians, and in parentheses the least and the largest."""
        head = (
            *("", "workers", "samples/s", "planner", "peak", "average speed-up"),
            *("test loss, nats", "accuracy, %", "rate"),
        )
        rows = [
            (
                *(p.contender, str(p.workers), p.samples_per_s.text(",.0f")),
                "" if p.predicted is None else f"{p.predicted:,.0f}",
                *(f"{p.peak:.2f}", p.average.text(".2f")),
                Spread.of(p.learned.losses).text(".3f") if p.learned else "",
                p.accuracy.text(".1f") if p.accuracy else "",
                f"{p.learned.lr:g}" if p.learned else "",
            )
            for p in self.results.points()
        ]
        print(f"\n{self.title}\n", *table(head, rows), "", *self.notes(), sep="\n")

    def notes(self) -> list[str]:
        """Describe the measurement for the table and the figure."""
        results, options = self.results, self.results.options
        dilation = max(timed.dilation for timed in results.timed)
        return [
            f"A host for each worker, {results.rate}, emulated on {results.machine['cores']} cores "
            f"({results.alone.axpy_gb_per_s:.1f} GB/s, x -= a*y in place). Computing is a wait of "
            f"what one core needs: {results.alone.gradient_s * 1e3:.2f} ms a minibatch of {BATCH}. "
            f"Time is dilated up to {dilation:g} times, so that each host has a core.",
            f"Every run has {options['samples']:,} samples and {options['evaluations']} "
            "evaluations. Peak: best rate of steps; average: a whole training. "
            f"Least to largest of {options['rounds']} rounds and {options['seeds']} seeds. "
            "The asynchronous workers have a server beside them.",
        ]

    def content(self) -> dict[str, Any]:
        return {"title": self.title, **asdict(self.results)}

    def draw(self, path: str | os.PathLike[str]) -> None:
        notes = [*self.notes(), "Model averaging, SlowMo and DiLoCo: in the table alone."]
        draw(self.results, self.title, notes, Path(path))
