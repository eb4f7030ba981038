"""Runs of Weights & Biases and MLflow by their real packages, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import patience

pytest.importorskip("sklearn")
ROOT = Path(__file__).parents[2]
CLOSED = "http://127.0.0.1:9"  # the port of "discard", where nobody listens

TRAIN = ["-m", "parallel_sgd", "simulate", "-n", "2", "--no-plot", "--checkpoint-every", "1437"]


def train(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Train the digits on two ranks, in the folder."""
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    blas = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    mine = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    return subprocess.run(
        [sys.executable, *TRAIN, *options],
        cwd=folder,
        env={**mine, **quiet, **blas, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def records(path: Path) -> Iterator[Any]:
    """The records of a file that wandb keeps: blocks of 32 KiB, as LevelDB's log has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too short for a head
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_run(folder: Path, number: int) -> dict[str, Any]:
    """What wandb has kept of a start of the run: its number, rows, options and exit code."""
    files = sorted(folder.glob("run/wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    found: dict[str, Any] = {"rows": [], "config": {}}
    for record in records(files[number]):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            found["rows"].append({k: v for k, v in row.items() if not k.startswith("_")})
        elif kind == "run":
            found |= {"id": record.run.run_id, "project": record.run.project}
            updates = record.run.config.update
            found["config"] |= {item.key: json.loads(item.value_json) for item in updates}
        elif kind == "exit":
            found["code"] = record.exit.exit_code
    return found


def test_wandb_offline_has_every_row_and_a_resumed_run_continues(tmp_path: Path) -> None:
    options = ["--tracker", "wandb", "--project", "digits", "--output", "run", "--epochs", "3"]
    done = train(tmp_path, *options, "--lr", "0.2", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    first = wandb_run(tmp_path, 0)
    numbers = [
        {name: value for name, value in row.items() if isinstance(value, int | float)}
        for row in metrics(tmp_path)
    ]
    assert [row["samples"] for row in first["rows"]] == [1438, 2876, 4314]
    assert first["rows"] == numbers
    assert (first["project"], first["code"]) == ("digits", 0)
    assert first["config"]["epochs"] == 3 and first["config"]["optimizer"]["lr"] == 0.2
    assert json.loads((tmp_path / "run" / "tracker.json").read_text()) == {"wandb": first["id"]}
    done = train(tmp_path, "--resume", "run", "--epochs", "4", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    second = wandb_run(tmp_path, 1)
    assert (second["id"], second["project"]) == (first["id"], "digits")
    assert [row["samples"] for row in second["rows"]][-1] == 5752


def test_a_run_that_diverges_has_failed_at_wandb(tmp_path: Path) -> None:
    options = ["--tracker", "wandb", "--output", "run", "--lr", "1e38"]
    done = train(tmp_path, *options, WANDB_MODE="offline")
    assert done.returncode == 2 and "smaller learning rate" in done.stderr
    assert wandb_run(tmp_path, 0)["code"] == 1


def test_wandb_without_a_key_is_refused_before_training(tmp_path: Path) -> None:
    done = train(tmp_path, "--tracker", "wandb", "--output", "run")
    assert done.returncode == 2
    assert "error: tracker='wandb' needs an API key: run `wandb login`" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [("WANDB_API_KEY", "short", "40+ characters"), ("WANDB_MODE", "foo", "input_value='foo'")],
)
def test_what_wandb_refuses_is_one_line(
    tmp_path: Path, variable: str, value: str, problem: str
) -> None:
    done = train(tmp_path, "--tracker", "wandb", "--output", "run", **{variable: value})
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("wandb:"))
    assert "error: tracker='wandb' cannot be used: " in line and problem in line
    assert not (tmp_path / "run").exists()


def test_without_a_connection_the_run_is_kept_for_wandb_sync(tmp_path: Path) -> None:
    options = ["--tracker", "wandb", "--output", "run", "--epochs", "2"]
    began = time.monotonic()
    soon = {"WANDB_INIT_TIMEOUT": "2", "WANDB_HTTP_TIMEOUT": "1"}
    done = train(tmp_path, *options, WANDB_BASE_URL=CLOSED, WANDB_API_KEY="a" * 40, **soon)
    assert time.monotonic() - began < 60 * patience()
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    (line,) = (line for line in lines if line.startswith("parallel_sgd: wandb:"))
    kept = json.loads((tmp_path / "run" / "tracker.json").read_text())["wandb"]
    assert f"the run is kept on the disk, for `wandb sync --id {kept} run/wandb/offline-run" in line
    assert line.endswith("; training goes on")
    assert [row["samples"] for row in wandb_run(tmp_path, 0)["rows"]] == [1438, 2876]


def test_mlflow_in_a_folder_has_every_row_and_a_resumed_run_continues(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    store = (tmp_path / "store").as_uri()
    options = ["--tracker", "mlflow", "--project", "digits", "--output", "run", "--epochs", "3"]
    done = train(tmp_path, *options, "--lr", "0.2", MLFLOW_TRACKING_URI=store)
    assert done.returncode == 0, done.stderr
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=store)
    number = json.loads((tmp_path / "run" / "tracker.json").read_text())["mlflow"]

    def logged(name: str) -> list[tuple[int, float]]:
        return sorted((each.step, each.value) for each in client.get_metric_history(number, name))

    def rows(name: str) -> list[tuple[int, float]]:
        return [(row["samples"], row[name]) for row in metrics(tmp_path)]

    run = client.get_run(number)
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert client.get_experiment(run.info.experiment_id).name == "digits"
    assert run.data.params["optimizer.lr"] == "0.2" and run.data.params["epochs"] == "3"
    for name in ("train_loss", "test_accuracy", "bytes_sent", "seconds"):
        assert logged(name) == rows(name)
    resumed = ["--resume", "run", "--epochs", "4"]
    done = train(tmp_path, *resumed, MLFLOW_TRACKING_URI=store)
    assert done.returncode == 0, done.stderr
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert logged("train_loss") == rows("train_loss") and len(logged("train_loss")) == 4
    after = client.get_run(number)
    assert after.info.status == "FINISHED"
    assert (after.data.params["epochs"], after.data.tags["resumed.epochs"]) == ("3", "4")


def test_training_goes_on_without_a_tracking_server(tmp_path: Path) -> None:
    few = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
    options = ["--tracker", "mlflow", "--output", "run", "--epochs", "2"]
    done = train(tmp_path, *options, MLFLOW_TRACKING_URI=CLOSED, **few)
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if line.startswith("parallel_sgd: mlflow")]
    assert len(warned) == 2
    assert "Connection refused" in warned[0] and warned[0].endswith("; training goes on")
    assert "mlflow: 2 rows have not arrived" in warned[1]
    assert [row["samples"] for row in metrics(tmp_path)] == [1438, 2876]


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line(tmp_path: Path, package: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        f"sys.modules[{package!r}] = None\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *more: None if name == {package!r} else "
        "find(name, *more)\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = train(tmp_path, "--tracker", package, "--output", "run", PYTHONPATH=path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"tracker='{package}' needs {package} (" in line
    assert f"pip install '.[{package}]' from the checkout" in line
    assert not (tmp_path / "run").exists()
