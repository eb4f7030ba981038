"""train.py for real, on ranks: what it trains, what it leaves behind, and how it refuses."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jobs import SECONDS, TRAIN, End, by_ranks, data_files, executed, finished, trainings
from limits import patience

RANKS = 4


def on_ranks(*arguments: str, ranks: int = RANKS, script: str = TRAIN) -> tuple[int, str]:
    """Exit code and all output of `parallel-sgd run -n K script …`."""
    return finished("run", "-n", str(ranks), script, *arguments)


@pytest.mark.any_mpi
def test_one_bit_training_is_as_good_as_serial(folder: Path) -> None:
    code, output = on_ranks(
        *["--gradient-bits", "1", "--hidden", "256", "--epochs", "20", "--lr", "0:0.3,20000:0.05"],
        *["--compare-serial", "--output", "run"],
        ranks=2,
    )
    assert code == 0, output
    assert "2 ranks" in output
    summary = json.loads((folder / "run" / "summary.json").read_text())
    ours, serial = summary["2 ranks, 1 bit"], summary["serial SGD, same seed"]
    assert ours["samples"] == serial["samples"] == 20 * 1438
    assert abs(ours["test_loss"] - serial["test_loss"]) < 0.01
    assert ours["test_accuracy"] >= 0.96
    assert serial["bytes_sent"] == 0
    assert 25 < summary["bytes_in_32_bit"] / ours["bytes_sent"] < 32

    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, 21))
    assert lines[-1] == ours
    assert lines[-1]["train_loss"] < lines[0]["train_loss"] / 10
    with np.load(folder / "run" / "model.npz", allow_pickle=False) as model:
        shapes = {name: model[name].shape for name in model}
    assert shapes == {"W1": (64, 256), "b1": (256,), "W2": (256, 10), "b2": (10,)}
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list((folder / "run").glob(".*"))


@pytest.mark.any_mpi
def test_images_from_files_and_a_rank_with_nothing_to_do(folder: Path) -> None:
    """Three samples in a minibatch for four ranks, and a last minibatch of one."""
    np.save("x.npy", np.random.default_rng(0).standard_normal((25, 2, 3)))
    np.save("y.npy", np.arange(25) % 3)
    code, output = on_ranks(
        *["--data", "x.npy", "--labels", "y.npy", "--model", "softmax", "--no-plot"],
        *["--minibatch-size", "3", "--epochs", "2", "--gradient-bits", "4", "--test", "0.4"],
        *["--lr", "0.01", "--output", "run"],
    )
    assert code == 0, output
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["samples"] == 2 * 15
    assert not (folder / "run" / "loss.png").exists()
    options = json.loads((folder / "run" / "options.json").read_text())
    assert options["classes"] == 3
    assert options["algorithm"]["name"] == "DataParallelSGD"
    assert options["algorithm"]["block_size"] == 1024
    assert options["optimizer"] == {"name": "SGD", "lr": 0.01, "lr_per_sample": None}


@pytest.mark.any_mpi
def test_training_loss_across_the_end_of_a_warm_start(folder: Path) -> None:
    """Until then every rank has the whole minibatch, whose loss counts once."""
    ends, losses = ("0", "700", "1438"), []
    short = ("--epochs", "1", "--no-plot")
    lines = [["--distributed-after", after, *short, "--output", after] for after in ends]
    trainings(folder, *lines, ranks=RANKS)
    for after in ends:
        metrics = json.loads((folder / after / "metrics.jsonl").read_text())
        losses.append(metrics["train_loss"])
    assert losses[1:] == pytest.approx(2 * losses[:1], rel=1e-3)


#: What only a look at the samples, or at the training, can show.
FOUND_IN_TRAINING = (
    "--data nan.npz --test 0.1",
    "--data good.npz --lr 1e38 --epochs 50",
    "--data good.npz --lr 1e38 --epochs 9 --algorithm slowmo",
)


#: What is refused where, with a part of what is said: the other messages have tests of their own.
BAD_INPUT = [
    ("--gradient-bits 9", "gradient_bits=9 must be a number from 0.05 to 8, 16 or 32"),
    ("--algorithm magic", "invalid choice: 'magic'"),
    ("--epochs 0", "epochs=0 must be"),
    ("--resume missing", "checkpoint 'missing' must be a folder"),
    ("--algorithm block-momentum --block-samples 32", "block_samples=32 must be at least a min"),
    ("--hidden 1000000000000", "the model needs"),
    ("--data missing.npz", "missing.npz: there is no such file"),
    ("--data labels.npz --classes 4", "labels.npz: y[3] = 17"),
    ("--data nan.npz --test 0.1", "nan.npz: x[30]"),
    ("--data good.npz --lr 1e38 --epochs 50", "smaller learning rate"),
    ("--data good.npz --lr 1e38 --epochs 9 --algorithm slowmo", "smaller learning rate"),
    ("--output good.npz", "output='good.npz'"),
]


def bad_line(number: int) -> list[str]:
    """The whole command line of a row of the table, with a folder of its own for the results."""
    arguments = BAD_INPUT[number][0].split()
    target = [] if "--output" in arguments else ["--output", f"run-{number}"]
    return [*arguments, "--no-plot", *target]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[End]]]:
    """How every rank has refused every row of the table, all in one start."""
    folder = tmp_path_factory.mktemp("bad-input")
    data_files(folder)
    return folder, trainings(folder, *map(bad_line, range(len(BAD_INPUT))), ranks=3)


def one_line_each(output: str, expected: str) -> None:
    """Every one of three ranks has said one line, of what is wrong; the launcher has printed it
    once.

    And perhaps the same before, where the others have let it wait for long.
    """
    for rank in range(3):
        lines = [text for k, text in by_ranks(output) if k == rank]
        (line,) = (line for line in lines if "; this rank now waits for" not in line)
        assert line.startswith("parallel-sgd: error: "), line
        assert expected in line
    assert "Traceback" not in output


@pytest.mark.any_mpi
@pytest.mark.parametrize("number", range(len(BAD_INPUT)), ids=[row[0] for row in BAD_INPUT])
def test_bad_input_is_one_line_on_every_rank(
    refusals: tuple[Path, list[list[End]]], number: int
) -> None:
    folder, ends = refusals
    arguments, expected = BAD_INPUT[number]
    one_line_each("".join(end.said for end in ends[number]), expected)
    run = f"run-{number}"
    for end in ends[number]:
        assert end.code != 0
        assert end.shared, "a rank may end the job before the others have said it"
        assert end.written == ([run] if arguments in FOUND_IN_TRAINING else [])
    assert not (folder / run / "model.npz").exists()


@pytest.mark.parametrize(
    "arguments",
    ["--gradient-bits 9", "--data labels.npz --classes 4", FOUND_IN_TRAINING[1]],
    ids=["option", "data", "training"],
)
def test_bad_input_ends_the_job(arguments: str, folder: Path) -> None:
    """As above, but for real: one of each kind."""
    data_files(folder)
    before = {path.name for path in folder.iterdir()}
    started = time.monotonic()
    code, output = on_ranks(*arguments.split(), "--no-plot", "--output", "run", ranks=3)
    assert time.monotonic() - started < SECONDS * patience()
    assert code != 0, output
    one_line_each(output, dict(BAD_INPUT)[arguments])
    assert output.count("parallel-sgd: error: ") == 1
    written = {path.name for path in folder.iterdir()} - before
    assert written == ({"run"} if arguments in FOUND_IN_TRAINING else set())
    assert not (folder / "run" / "model.npz").exists()


def test_a_slow_rank_too_is_among_those_that_share_an_error(folder: Path) -> None:
    """Longer than a rank waits for others with an error of its own."""
    Path("script.py").write_text(
        "import time, parallel_sgd as psgd\n"
        "comm = psgd.Communicator.world()\n"
        "try:\n"
        "    comm.raise_together('disk full')\n"
        "finally:\n"
        "    time.sleep(1.2 * comm.rank)\n"
    )
    code, output = on_ranks(ranks=3, script="script.py")
    assert code != 0
    said = "[ranks 0 to 2] parallel-sgd: error: disk full (on ranks 0, 1, 2)"
    assert [line.startswith(said) for line in output.splitlines() if "error: " in line] == [True]


def test_a_program_may_end_while_something_runs_in_the_background(folder: Path) -> None:
    """MPI is not shut down under an exchange, nor under a checkpoint that is being written."""
    Path("script.py").write_text(
        "import numpy as np, parallel_sgd as psgd\n"
        "comm = psgd.Communicator.world()\n"
        "parameters = psgd.Parameters({'w': np.zeros(2**21, np.float32)})\n"
        "algorithm = psgd.ModelAveragingSGD(sync_steps=2, overlap_samples=1000)\n"
        "learner = psgd.Learner(parameters, psgd.SGD(lr=0.1), algorithm, comm)\n"
        "checkpoints = psgd.Checkpoints('checkpoints')\n"
        "for _ in range(2):\n"
        "    learner.step(samples=1)\n"
        "checkpoints.save(learner)\n"
        "for _ in range(2):\n"
        "    learner.step(samples=1)\n"
    )
    code, output = on_ranks(ranks=2, script="script.py")
    assert code == 0, output
    assert [path.name for path in Path("checkpoints").glob("0*[0-9]")]


OTHER_OPTIONS = [
    ("--minibatch-size", ("64", "32", "64"), "minibatch_size"),
    ("--test", ("0.2", "0.3", "0.2"), "number of samples"),
]


@pytest.mark.any_mpi
def test_ranks_with_other_options_are_named(folder: Path) -> None:
    """One rank was started with another command line, as `mpiexec … : …` can do."""
    usual = ["--no-plot", "--output", "run"]
    lines = [[[*usual, option, given] for given in values] for option, values, _ in OTHER_OPTIONS]
    ends = trainings(folder, *lines, ranks=3)
    for (_, _, fact), by_rank in zip(OTHER_OPTIONS, ends, strict=True):
        for end in by_rank:
            assert (end.code, end.shared, end.written) == (1, True, [])
            assert re.search(rf"error: .*{fact}.* must be the same on all ranks", end.said)
            assert end.said.count("\n") == 1


@pytest.mark.any_mpi
def test_plain_python_is_one_rank(folder: Path) -> None:
    """Without mpiexec the same command trains alone."""
    options = ["--epochs", "1", "--no-plot", "--output", "run"]
    code, output = executed([sys.executable, TRAIN, *options])
    assert code == 0, output
    assert "1 rank" in output
    assert (folder / "run" / "model.npz").exists()
