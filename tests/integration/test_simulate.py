"""`parallel-sgd simulate`: what N ranks of MPI would have trained, on threads of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jobs import TRAIN, finished


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "options",
    [
        "--gradient-bits 1",
        "--algorithm block-momentum --sync-period 150 --gradient-bits 1 --overlap-samples 100",
        "--algorithm diloco --sync-steps 20 --optimizer adam",
    ],
)
def test_threads_train_the_model_that_ranks_of_mpi_train(folder: Path, options: str) -> None:
    arguments = [*options.split(), "--hidden", "32", "--epochs", "3", "--no-plot", "--output"]
    models = []
    for name, start in (("threads", ["simulate"]), ("mpi", ["run"])):
        script = [] if name == "threads" else [TRAIN]
        code, output = finished(*start, "-n", "3", *script, *arguments, name)
        assert code == 0, output
        assert "3 ranks" in output
        with np.load(folder / name / "model.npz", allow_pickle=False) as model:
            models.append({key: model[key] for key in model})
    threads, mpi = models
    assert threads.keys() == mpi.keys()
    for key in threads:
        assert np.array_equal(threads[key], mpi[key]), key


def test_more_ranks_than_cores(folder: Path) -> None:
    code, output = finished(
        *["simulate", "-n", "64", "--algorithm", "model-averaging", "--sync-steps", "5"],
        *["--minibatch-size", "256", "--epochs", "2", "--no-plot"],
    )
    assert code == 0, output
    assert output.startswith("64 ranks, 1438 samples")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "the following arguments are required: -n"),
        ("-n 0", "must be a whole number of at least 1: '0'"),
        ("-n 4 --gradient-bits 3", "gradient_bits=3 must be one of"),
        ("-n 4 --algorithm block-momentum --block-momentum 1", "block_momentum=1.0 must be"),
        ("-n 4 --data missing.npz", "there is no such data file (on ranks 0, 1, 2, 3)"),
        ("-n 4 --lr 1e38 --epochs 3", "smaller learning rate"),
    ],
)
def test_bad_input_is_one_line(arguments: str, expected: str) -> None:
    code, output = finished("simulate", *arguments.split(), "--no-plot")
    assert code == 2
    assert expected in output
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("parallel-sgd: error: ")


def test_help_shows_the_options_of_training() -> None:
    code, output = finished("simulate", "--help")
    assert code == 0
    assert "-n N" in output
    assert "--sync-period" in output
