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
from .timing import in_turn, seconds_of

VECTORS = 3  #: of the model's size in a checkpoint: the model and Adam's two
STEPS = 10  #: between two checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--megabytes", type=positive, default=210, metavar="N", help="a checkpoint (default: 210)"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="(default: 5)")
    parser.add_argument("--folder", metavar="FOLDER", help="on the disk to measure (default: .)")


def main(options: argparse.Namespace) -> Report:
    values = options.megabytes * 1_000_000 // 4 // VECTORS
    with tempfile.TemporaryDirectory(dir=options.folder or ".") as folder:
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

    def copy() -> None:
        checkpoints.save(learner)

    step()
    copy()  # the first one takes memory, and makes a communicator
    checkpoints.wait()
    lists: list[list[float]] = [[] for _ in range(6)]
    writes, saves, alone, copies, meanwhile, spans = lists
    counts: list[int] = []
    for _ in range(repeats):
        writes.append(seconds_of(plain))
        step()
        saves.append(seconds_of(lambda: checkpoints.save(learner, background=False)))
        writes.append(seconds_of(plain))
        alone += in_turn({"": step}, STEPS, warm_up=0)[""]
        begin = time.perf_counter()
        copies.append(seconds_of(copy))
        during = []
        while checkpoints.writing:
            during.append(seconds_of(step))
        checkpoints.wait()
        spans.append(time.perf_counter() - begin)
        counts.append(len(during))
        meanwhile += during
    loads = in_turn({"": lambda: load_checkpoint(learner, folder)}, repeats, warm_up=0)[""]

    usual = median(alone)
    megabytes, write = VECTORS * parameters.flat.nbytes / 1e6, min(writes)
    report = Report(f"A checkpoint of {megabytes:.0f} MB, one rank")
    peer = "a plain write and fsync"

    def speed(name: str, seconds: float) -> None:
        report.compare(name, megabytes / seconds, "MB/s", peer, megabytes / write, ".0f")

    speed("written before returning", min(saves))
    report.compare("in the background, until on the disk", min(spans), "s", peer, write, ".3f")
    report.compare("training stands still", min(copies), "s", peer, write, ".3f")
    report.add(
        "a step meanwhile",
        median(meanwhile) if meanwhile else float("nan"),
        "s",
        f"one while nothing is written, {usual:.4f} s; {len(meanwhile)} steps",
        median(meanwhile) / usual if meanwhile else None,
    )
    cost = median(span - steps * usual for span, steps in zip(spans, counts, strict=True))
    report.compare("training loses in all, per checkpoint", cost, "s", peer, write, ".3f")
    speed("loading", min(loads))
    return report
