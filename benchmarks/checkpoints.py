"""The cost of a checkpoint: against a plain write of the same bytes, and to training meanwhile.

One rank with Adam: a checkpoint holds three vectors of the model's size. The plain write is one
`write` of all bytes and an `fsync`, on the same disk, before and after. A step of training
is measured while a checkpoint is written, and while none is. Writes and reads:
the best of all; steps: the median.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np

from parallel_sgd import (
    Adam,
    Checkpoints,
    Communicator,
    DataParallelSGD,
    Learner,
    Parameters,
    load_checkpoint,
)

from .report import Report, positive
from .timing import seconds_of

VECTORS = 3  #: of the model's size in a checkpoint: the model and Adam's two
STEPS = 10  #: between two checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--megabytes", type=positive, default=210, metavar="N", help="a checkpoint (default: 210)"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="(default: 5)")


def main(options: argparse.Namespace) -> Report:
    values = options.megabytes * 1_000_000 // 4 // VECTORS
    with tempfile.TemporaryDirectory(dir=".") as folder:
        return _measure(Path(folder), values, options.repeats)


def _measure(folder: Path, values: int, repeats: int) -> Report:
    parameters = Parameters({"w": np.zeros(values, np.float32)})
    learner = Learner(parameters, Adam(lr=1e-4), DataParallelSGD(), Communicator.single())
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    learner.gradient.flat[:] = np.random.default_rng(0).standard_normal(values, np.float32)
    data = np.concatenate([learner.gradient.flat] * VECTORS)

    def step() -> None:
        learner.step(samples=1)

    def plain() -> None:
        with (folder / "plain").open("wb") as file:
            file.write(data.data)
            file.flush()
            os.fsync(file.fileno())
        (folder / "plain").unlink()

    step()
    checkpoints.save(learner)  # the first one takes memory, and makes a communicator
    checkpoints.wait()
    seconds: dict[str, list[float]] = defaultdict(list)
    losses: list[tuple[float, int]] = []  #: seconds of a save in the background; steps meanwhile
    for _ in range(repeats):
        seconds["plain"].append(seconds_of(plain))
        step()
        seconds["save"].append(seconds_of(lambda: checkpoints.save(learner, background=False)))
        seconds["plain"].append(seconds_of(plain))
        seconds["step"] += [seconds_of(step) for _ in range(STEPS)]
        begin = time.perf_counter()
        seconds["copy"].append(seconds_of(lambda: checkpoints.save(learner)))
        during = []
        while checkpoints.writing:
            during.append(seconds_of(step))
        checkpoints.wait()
        losses.append((time.perf_counter() - begin, len(during)))
        seconds["meanwhile"] += during
    loads = [seconds_of(lambda: load_checkpoint(learner, folder)) for _ in range(repeats)]

    usual, meanwhile = median(seconds["step"]), seconds["meanwhile"]
    megabytes, write = VECTORS * parameters.flat.nbytes / 1e6, min(seconds["plain"])
    report = Report(f"A checkpoint of {megabytes:.0f} MB, one rank")
    peer = "a plain write and fsync"
    for name, of in (("written before returning", seconds["save"]), ("loading", loads)):
        report.compare(name, megabytes / min(of), "MB/s", peer, megabytes / write, ".0f")
    cost = median(span - steps * usual for span, steps in losses)
    for name, value in (
        ("in the background, until on the disk", min(losses)[0]),
        ("training stands still", min(seconds["copy"])),
        ("training loses in all, per checkpoint", cost),
    ):
        report.compare(name, value, "s", peer, write, ".3f")
    if meanwhile:
        peer = f"{len(meanwhile)} steps; one while nothing is written"
        report.compare("a step meanwhile", median(meanwhile), "s", peer, usual, ".4f")
    return report
