"""`parallel-sgd predict`: a run's model says of data what it said in training."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel_sgd import Communicator, UserError
from parallel_sgd.command_line import predict, read, train_on

NAMES = np.array(["cat", "dog", "emu"])

NETWORK = """\
import torch


def network(shape, outputs):
    norm = torch.nn.BatchNorm1d(*shape, momentum=0.5)
    return torch.nn.Sequential(norm, torch.nn.Linear(*shape, outputs), torch.nn.Dropout(0.5))
"""


def samples(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(3).normal(size=(last, 3))[first:] * [1, 10, 100] + [0, 5, 50]
    return x, ((x - [0, 5, 50]) / [1, 10, 100]).argmax(1)


def write_table(path: str, x: Any, columns: str = "abc", **targets: Any) -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *targets])
        order = ["abc".index(name) for name in columns]
        for i, row in enumerate(x):
            writer.writerow([*row[order], *(target[i] for target in targets.values())])


def trained(*arguments: str, output: str = "run") -> None:
    options, algorithm, optimizer = read(
        [*arguments, "--epochs", "12", "--no-plot", "--no-progress-bar", "--output", output]
    )
    with Communicator.single() as comm:
        train_on(options, algorithm, optimizer, comm)


def last_row(run: str = "run") -> dict[str, Any]:
    row: dict[str, Any] = json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[-1])
    return row


def predicted(capsys: Any, *arguments: str) -> tuple[list[list[str]], str]:
    """The rows, and what was told of them."""
    capsys.readouterr()
    assert predict.main(["run", *arguments]) == 0
    out, err = capsys.readouterr()
    return list(csv.reader(out.splitlines())), err


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run():
    """A run on a table with names of classes, whose features are standardized."""
    x, y = samples(0, 150)
    write_table("train.csv", x, label=NAMES[y])
    trained("--data", "train.csv", "--standardize", "--hidden", "8", "--lr", "0.5")


def test_the_same_predictions_whatever_the_data_are_kept_in(run, capsys):
    """Tables with other orders of columns, with fewer classes, without targets; arrays."""
    x, y = samples(150, 200)
    write_table("new.csv", x, label=NAMES[y])
    rows, said = predicted(capsys, "new.csv")
    names = [name for (name,) in rows[1:]]
    accuracy = np.mean(names == NAMES[y])
    assert rows[0] == ["class"] and len(names) == 50 and accuracy > 0.8
    assert said.startswith("50 samples, loss ")
    assert f"accuracy {accuracy:.6g}\n" in said
    write_table("turned.csv", x, "cab", more=x[:, 0], label=NAMES[y])
    assert predicted(capsys, "turned.csv") == (rows, said)
    some = y > 0  # by themselves their names would be those of labels 0 and 1
    write_table("two.csv", x[some], label=NAMES[y[some]])
    two, said = predicted(capsys, "two.csv")
    assert [name for (name,) in two[1:]] == [n for n, s in zip(names, some, strict=True) if s]
    assert f"accuracy {np.mean(np.array(two[1:])[:, 0] == NAMES[y[some]]):.6g}\n" in said
    write_table("without.csv", x, "bca")
    np.savez("x.npz", x=x)
    np.save("x.npy", x)
    np.save("y.npy", y)
    for path in ("without.csv", "x.npz", "x.npy"):
        assert predicted(capsys, path, "--no-targets") == (rows, "")
    assert predicted(capsys, "x.npy", "--labels", "y.npy")[0] == rows


def test_to_a_file_with_probabilities(run, capsys):
    x, y = samples(150, 1400)  # more than one batch
    write_table("new.csv", x, label=NAMES[y])
    classes = [row[0] for row in predicted(capsys, "new.csv")[0]]
    assert predict.main(["run", "new.csv", "--probabilities", "--output", "out.csv"]) == 0
    assert capsys.readouterr().out.startswith("1250 samples, loss ")
    rows = list(csv.reader(Path("out.csv").read_text().splitlines()))
    assert rows[0] == ["class", "probability_0", "probability_1", "probability_2"]
    assert [row[0] for row in rows] == classes
    odds = np.array([row[1:] for row in rows[1:]], float)
    assert np.allclose(odds.sum(1), 1, atol=1e-5)
    assert [row[0] for row in rows[1:]] == list(NAMES[odds.argmax(1)])
    before = Path("out.csv").read_bytes()
    Path("new.csv").write_text("a,b,c,label\n1,2,3,cat\n1,2,x,dog\n")
    with pytest.raises(UserError, match=r"new\.csv"):
        predict.main(["run", "new.csv", "--output", "out.csv"])
    assert Path("out.csv").read_bytes() == before
    assert sorted(path.name for path in Path().iterdir()) == [
        "new.csv",
        "out.csv",
        "run",
        "train.csv",
    ]


def test_what_was_tested_on_is_scored_as_in_training(capsys):
    """Also by a PyTorch model with BatchNorm, of a function in a file."""
    x, y = samples(0, 150)
    for part, (first, last) in {"train": (0, 100), "test": (100, 150)}.items():
        Path("data").mkdir(exist_ok=True)
        write_table(f"data/{part}.csv", x[first:last], label=y[first:last])
    Path("own.py").write_text(NETWORK)
    for model in ("linear", "own.py:network"):
        trained("--data", "data", "--model", model, "--lr", "0.1", output=f"of-{model}")
        capsys.readouterr()
        assert predict.main([f"of-{model}", "data"]) == 0  # the part to test on
        out, err = capsys.readouterr()
        metrics = last_row(f"of-{model}")
        assert len(out.splitlines()) == 51
        assert err == (
            f"50 samples, loss {metrics['test_loss']:.6g}, "
            f"accuracy {metrics['test_accuracy']:.6g}\n"
        )


def test_numbers_and_labels(capsys):
    x, _ = samples(0, 90)
    z = (x - [0, 5, 50]) / [1, 10, 100]
    write_table("train.csv", z, u=z @ [1.0, 2, 3] + 0.25, v=z[:, 0] - 0.5)
    trained("--data", "train.csv", "--y", "u", "v", "--x", *"abc", "--model", "linear")
    rows, said = predicted(capsys, "train.csv", "--y", "u", "v")
    assert rows[0] == ["value_0", "value_1"] and "r2 " in said
    values = np.array(rows[1:], float)
    assert np.corrcoef(values[:, 0], z @ [1.0, 2, 3])[0, 1] > 0.9
    with pytest.raises(UserError, match="probabilities=True has no effect without a task with"):
        predict.main(["run", "train.csv", "--y", "u", "v", "--probabilities"])
    labels = (z > 0).astype(int)
    write_table("labels.csv", z, u=labels[:, 0], v=labels[:, 1])
    trained("--data", "labels.csv", "--y", "u", "v", "--x", *"abc", "--lr", "1", output="run2")
    capsys.readouterr()
    assert predict.main(["run2", "labels.csv", "--probabilities"]) == 0
    out, err = capsys.readouterr()
    rows = list(csv.reader(out.splitlines()))
    assert rows[0] == ["label_0", "label_1", "probability_0", "probability_1"] and "f1 " in err
    found = np.array(rows[1:], float)
    assert np.array_equal(found[:, :2], found[:, 2:] > 0.5)
    assert (found[:, :2] == labels[:, :2]).mean() > 0.8


def edited(change: dict[str, Any]) -> None:
    facts = json.loads(Path("run/options.json").read_text())
    Path("run/options.json").write_text(json.dumps({**facts, **change}))


def test_misuse(run):
    x, y = samples(150, 160)
    write_table("new.csv", x, label=NAMES[y])
    Path("empty").mkdir()
    write_table("other.csv", x[:, :2], "ab", label=NAMES[y])
    np.save("x.npy", x[:, :2])
    for arguments, message in {
        ("none", "new.csv"): "run='none' must be the folder of a finished run of train.py",
        ("empty", "new.csv"): "it has no options.json",
        ("run", "none.csv"): "none.csv",
        ("run", "other.csv"): "x='c' is not a column of other.csv",
        ("run", "x.npy"): "x.npy needs labels",
        ("run", "x.npy", "--no-targets"): r"x has samples \[2\]: must be \[3\]",
        ("run", "new.csv", "--no-targets", "--labels", "y.npy"): "labels='y.npy' has no effect",
        ("run", "new.csv", "--output", "empty"): "empty",
    }.items():
        with pytest.raises(UserError, match=message) as refused:
            predict.main(arguments)
        assert "\n" not in str(refused.value)
    for change, message in [
        ({"outputs": -1}, "outputs=-1 must be a whole number, at least 1"),
        ({"task": "flying"}, "task='flying' must be one of"),
        ({"class_names": [1]}, r"class_names=\[1\] must be a list of texts"),
        ({"outputs": 4}, r"is of another model: its parameter W2 is \[8, 3\], but here \[8, 4\]"),
    ]:
        before = Path("run/options.json").read_text()
        edited(change)
        with pytest.raises(UserError, match=message):
            predict.main(["run", "new.csv"])
        Path("run/options.json").write_text(before)
    for text, wrong in {
        "[" * 100_000: "is a JSON document that is nested too deep",
        "9" * 5000: "is a JSON document with a number that has too many digits",
        "[1": "is not a JSON document: ",
        "{}": "it lacks 'outputs'",
    }.items():
        Path("run/options.json").write_text(text)
        with pytest.raises(UserError, match=f"run/options.json: {wrong}"):
            predict.main(["run", "new.csv"])
