"""`parallel-sgd simulate`: what N ranks of MPI would have trained, on threads of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jobs import finished, trainings

OPTIONS = [
    "--gradient-bits 1",
    "--algorithm block-momentum --sync-period 150 --gradient-bits 1 --overlap-samples 100",
    "--algorithm diloco --sync-steps 20 --optimizer adam",
]


def line(number: int) -> list[str]:
    usual = ["--hidden", "32", "--epochs", "3", "--no-plot", "--output", str(number)]
    return [*OPTIONS[number].split(), *usual]


def model_of(run: Path) -> dict[str, np.ndarray]:
    with np.load(run / "model.npz", allow_pickle=False) as model:
        return {key: model[key] for key in model}


@pytest.fixture(scope="module")
def by_mpi(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """The models that ranks of MPI train with each of the options, all in one start."""
    folder, numbers = tmp_path_factory.mktemp("mpi"), range(len(OPTIONS))
    ends = trainings(folder, *map(line, numbers), ranks=3)
    assert all(end.code == 0 for by_rank in ends for end in by_rank), ends
    return [model_of(folder / str(number)) for number in numbers]


@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=OPTIONS)
def test_threads_train_the_model_that_ranks_of_mpi_train(
    folder: Path, by_mpi: list[dict[str, np.ndarray]], number: int
) -> None:
    code, output = finished("simulate", "-n", "3", *line(number))
    assert code == 0, output
    assert "3 ranks" in output
    threads, mpi = model_of(folder / str(number)), by_mpi[number]
    assert threads.keys() == mpi.keys()
    for key in threads:
        assert np.array_equal(threads[key], mpi[key]), key


@pytest.mark.any_mpi
def test_more_ranks_than_cores(folder: Path) -> None:
    code, output = finished(
        *["simulate", "-n", "64", "--algorithm", "model-averaging", "--sync-steps", "5"],
        *["--minibatch-size", "256", "--epochs", "2", "--no-plot"],
    )
    assert code == 0, output
    assert output.startswith("64 ranks, 1438 samples")


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-n 0", "must be a whole number from 1 to 1048576: '0'"),
        ("-n 4 --data missing.npz", "there is no such file (on ranks 0, 1, 2, 3)"),
        ("-n 4 --lr 1e38 --epochs 3", "smaller learning rate"),
    ],
)
def test_bad_input_is_one_line(arguments: str, expected: str) -> None:
    code, output = finished("simulate", *arguments.split(), "--no-plot")
    assert code == 2
    assert expected in output
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("parallel-sgd: error: ")
