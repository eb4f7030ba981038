"""What a checkpoint costs: against a plain write of the same bytes, and to training meanwhile.

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
from collections.abc import Callable
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

VECTORS = 3  #: of the model's size in a checkpoint: the model and Adam's two


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
    random = np.random.default_rng(0)
    learner.gradient.flat[:] = random.standard_normal(values, np.float32)
    size = VECTORS * parameters.flat.nbytes
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

    def whole() -> None:
        step()
        begin = time.perf_counter()
        checkpoints.save(learner, background=False)
        saves.append(time.perf_counter() - begin)

    saves: list[float] = []
    step()
    copy()  # the first one takes memory, and makes a communicator
    checkpoints.wait()
    writes, alone, copies, meanwhile, counts, spans = [], [], [], [], [], []
    for _ in range(repeats):
        writes.append(_timed(plain))
        whole()
        writes.append(_timed(plain))
        alone += [_timed(step) for _ in range(10)]
        begin = time.perf_counter()
        copies.append(_timed(copy))
        during = []
        while checkpoints.writing:
            during.append(_timed(step))
        checkpoints.wait()
        spans.append(time.perf_counter() - begin)
        counts.append(len(during))
        meanwhile += during

    def load() -> None:
        load_checkpoint(learner, folder)

    loads = [_timed(load) for _ in range(repeats)]

    megabytes = size / 1e6
    write, save, copied, span = (min(seconds) for seconds in (writes, saves, copies, spans))
    report = Report(f"A checkpoint of {megabytes:.0f} MB, one rank")
    report.add(
        "written before returning",
        megabytes / save,
        "MB/s",
        f"a plain write and fsync, {megabytes / write:.0f} MB/s",
        write / save,
    )
    report.add(
        "in the background, until on the disk",
        span,
        "s",
        f"a plain write and fsync, {write:.3f} s",
        span / write,
    )
    report.add(
        "training stands still",
        copied,
        "s",
        f"a plain write and fsync, {write:.3f} s",
        copied / write,
    )
    report.add(
        "a step meanwhile",
        median(meanwhile) if meanwhile else float("nan"),
        "s",
        f"one while nothing is written, {median(alone):.4f} s; {sum(counts)} steps",
        median(meanwhile) / median(alone) if meanwhile else None,
    )
    lost = median(s - n * median(alone) for s, n in zip(spans, counts, strict=True))
    report.add(
        "training loses in all, per checkpoint",
        lost,
        "s",
        f"a plain write and fsync, {write:.3f} s",
        lost / write,
    )
    report.add(
        "loading",
        megabytes / min(loads),
        "MB/s",
        f"a plain write and fsync, {megabytes / write:.0f} MB/s",
        write / min(loads),
    )
    return report


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
