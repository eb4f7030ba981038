"""A tracked session: the first rank logs every row, and closes the run as the session has ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from sessions import SIZE, data, learner_of, model, trained

import parallel_sgd as psgd
from parallel_sgd import Preempted, UserError
from parallel_sgd.communication import job_environment
from parallel_sgd.training.session import preemption
from parallel_sgd.training.session import tracking_services as services


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this process sends to MLflow."""
    made: list[Any] = []

    class Run(services.TrackedRun):
        @staticmethod
        def require() -> None:
            return None

        def open(self) -> None:
            made.append((self.run_id, self.config))
            self.run_id = self.run_id or "number"

        def log(self, rows: Sequence[services.Row]) -> int:
            made.extend(dict(row) for row in rows)
            return len(rows)

        def close(self, end: str) -> None:
            made.append(end)

    monkeypatch.setitem(services.SERVICES, "mlflow", Run)
    return made


def test_the_first_rank_logs_every_row_and_finishes(comm, calls, tmp_path):
    path = comm.allgather_object(tmp_path)[0] / "run"
    folder = psgd.RunFolder(path, {"note": "mine", "seed": "own"})
    tracker = psgd.Tracker("mlflow", "p")
    _, rows = trained(comm, folder=folder, tracker=tracker, test=data(7, 1))
    comm.barrier()
    if comm.rank == 0:
        (number, config), *logged, end = calls
        assert (number, end) == (None, "finished")
        assert (config["note"], config["seed"]) == ("mine", "own")
        assert (config["ranks"], config["minibatch_size"], config["epochs"]) == (comm.size, SIZE, 3)
        assert config["algorithm"].startswith("DataParallelSGD(")
        expected = [row.as_dict() for row in rows]
        assert len(logged) == 3 and "test_accuracy" in logged[-1]
        for got, row in zip(logged, expected, strict=True):
            assert got.pop("time") > 1e9
            assert got == {k: v for k, v in row.items() if isinstance(v, int | float)}
        assert (path / "tracker.json").is_file()


@pytest.mark.parametrize("completes", [True, False])
def test_the_folder_is_kept_until_the_run_is_closed(comm, calls, tmp_path, monkeypatch, completes):
    def fail(row):
        raise ValueError("wrong")

    close = psgd.RunFolder.close
    path = comm.allgather_object(tmp_path)[0] / "run"
    comm.barrier()
    if comm.rank == 0:

        def closed(folder):
            if folder.writes:
                status = json.loads((path / "status.json").read_text())["status"]
                calls.append(f"folder {status}")
            close(folder)

        monkeypatch.setattr(psgd.RunFolder, "close", closed)
    options = {"folder": psgd.RunFolder(path), "tracker": psgd.Tracker("mlflow")}
    with nullcontext() if completes else pytest.raises(UserError):
        trained(comm, **options, callbacks=[] if completes else [fail])
    comm.barrier()
    ends = [call for call in calls if isinstance(call, str)]
    if comm.rank == 0:
        assert ends[:2] == (
            ["finished", "folder complete"] if completes else ["failed", "folder failed"]
        )


@pytest.mark.threads(3)
@pytest.mark.ranks(2, 3)
def test_asynchronous_workers_log_rows_of_the_first(comm, calls):
    algorithm = psgd.DataParallelASGD(servers=1, sync_period=SIZE)
    trained(comm, algorithm, tracker=psgd.Tracker("mlflow"), epochs=2)
    comm.barrier()
    if comm.rank == 0:
        _, *logged, end = calls
        assert end == "finished" and [row["epoch"] for row in logged][-1] >= 2


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt()])
def test_a_session_that_fails_closes_its_run(comm, calls, error):
    def fail(row):
        raise error

    with pytest.raises(UserError if isinstance(error, Exception) else KeyboardInterrupt):
        trained(comm, tracker=psgd.Tracker("mlflow"), callbacks=[fail])
    end = "failed" if isinstance(error, Exception) else "killed"
    if comm.rank == 0:
        assert calls[-1] == end and len(calls) == 2


@pytest.mark.threads(3)
@pytest.mark.ranks(2, 3)
def test_a_preempted_run_is_closed_before_the_ranks_leave(comm, calls, tmp_path, monkeypatch):
    monkeypatch.setenv(job_environment.PREEMPT_ON, "SIGUSR2")
    for name, value in {"listen": lambda: None, "preemption_requested": lambda: True}.items():
        monkeypatch.setattr(preemption, name, value)
    folder = comm.allgather_object(str(tmp_path))[0]
    checkpoints = psgd.CheckpointConfig(folder=f"{folder}/checkpoints")
    with pytest.raises(Preempted):
        trained(comm, tracker=psgd.Tracker("mlflow"), checkpoints=checkpoints)
    if comm.rank == 0:
        assert calls[-1] == "preempted"


def test_a_resumed_run_continues(comm, calls, tmp_path):
    path = comm.allgather_object(tmp_path)[0] / "run"
    for resume, epochs in ((False, 2), (True, 3)):
        trained(
            comm,
            epochs=epochs,
            folder=psgd.RunFolder(path, resumed=resume),
            checkpoints=psgd.CheckpointConfig(folder=path / "checkpoints", every=60, resume=resume),
            tracker=psgd.Tracker("mlflow"),
        )
        comm.barrier()
    if comm.rank == 0:
        began = [call[0] for call in calls if isinstance(call, tuple)]
        assert began == [None, "number"]
        assert [call["epoch"] for call in calls if isinstance(call, dict)] == [1, 2, 3]
        assert calls.count("finished") == 2


def test_a_service_that_cannot_be_used_is_refused_on_all_ranks(comm, calls, tmp_path, monkeypatch):
    def require() -> None:
        raise UserError("tracker='mlflow' needs mlflow")

    path = comm.allgather_object(tmp_path)[0] / "run"
    comm.barrier()
    with monkeypatch.context() as patched:
        patched.setattr(services.SERVICES["mlflow"], "require", staticmethod(require))
        comm.barrier()
        with pytest.raises(UserError, match=r"^tracker='mlflow' needs mlflow \(on rank 0\)$"):
            trained(comm, folder=psgd.RunFolder(path), tracker=psgd.Tracker("mlflow"))
        comm.barrier()
    assert not path.exists() and calls == []


@pytest.mark.threads(3)
@pytest.mark.ranks(2, 3)
def test_ranks_with_other_trackers_disagree(comm):
    with pytest.raises(UserError, match="tracker must be the same on all ranks"):
        trained(comm, tracker=psgd.Tracker("mlflow", f"of rank {comm.rank}"))


def test_what_is_no_tracker(comm):
    own = model()
    with (
        learner_of(comm, own) as learner,
        pytest.raises(UserError, match="tracker must be a Tracker"),
    ):
        psgd.TrainingSession(
            learner=learner, objective=own, train=data(), minibatch_size=SIZE, tracker="wandb"
        ).run()
