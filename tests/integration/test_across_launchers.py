"""A run begun under one launcher goes on under another, over MPI or without, with the same bits."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from jobs import PARALLEL_SGD, TRAIN, executed

pytest.importorskip("torch")

OPTIONS = [
    *("--gradient-bits", "1", "--optimizer", "momentum", "--hidden", "16", "--no-plot"),
    *("--checkpoint-every", "300"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def train(launcher: str, *arguments: str, ranks: int = 2) -> None:
    count = str(ranks)
    starts = {
        "mpi": [*PARALLEL_SGD, "run", "-n", count],
        "torchrun": [*TORCHRUN, "--nproc-per-node", count],
    }
    code, output = executed([*starts[launcher], TRAIN, *OPTIONS, *arguments])
    assert code == 0, output
    assert f"{ranks} ranks" in output


def metrics(run: str) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, but for the seconds."""
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


def require_same(run: str, other: str) -> None:
    assert metrics(run) == metrics(other) != []
    with np.load(f"{run}/model.npz") as one, np.load(f"{other}/model.npz") as two:
        assert all(np.array_equal(one[name], two[name]) for name in one) and len(one.files) > 1


@pytest.mark.any_mpi
def test_a_run_goes_on_under_another_launcher(folder: Path) -> None:
    train("mpi", "--epochs", "2", "--output", "whole")
    for first, second in (("mpi", "torchrun"), ("torchrun", "mpi")):
        train(first, "--epochs", "1", "--output", first)
        assert list(Path(first, "checkpoints").iterdir())
        if first == "mpi":
            shutil.copytree("mpi", "three")
        train(second, "--epochs", "2", "--resume", first)
        require_same(first, "whole")
    train("torchrun", "--epochs", "2", "--resume", "three", ranks=3)
    assert metrics("three")[-1]["samples"] == metrics("whole")[-1]["samples"]
