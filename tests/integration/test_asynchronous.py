"""Parameter servers as users run them: roles, replay, resumption, bad options, lost ranks."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from jobs import ENVIRONMENT, ROOT, TRAIN, executed, finished, trainings
from limits import patience

USUAL = ["--algorithm", "async", "--sync-steps", "1", "--no-plot", "--hidden", "32"]


def model_of(run: str) -> dict[str, np.ndarray]:
    with np.load(Path(run, "model.npz"), allow_pickle=False) as model:
        return {key: model[key] for key in model}


def rows_of(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_recorded_and_replayed_by_threads() -> None:
    options = [*USUAL, "--epochs", "3", "--min-block", "200", "--gradient-bits", "4"]
    code, output = finished(
        *["run", "-n", "4", "--servers", "2", TRAIN, *options],
        *["--output", "run", "--record", "order"],
    )
    assert code == 0, output
    assert "2 workers and 2 servers" in output
    rows = rows_of("run")
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [worker["worker"] for worker in rows[0]["details"]["workers"]] == [0]
    workers = rows[-1]["details"]["workers"]
    assert [worker["worker"] for worker in workers] == [0, 1]
    assert sum(worker["samples"] for worker in workers) == 3 * 1438
    for worker in workers:
        assert sum(worker["staleness"].values()) == worker["pushes"] == 3 * 23
        assert min(worker["seconds"].values()) >= 0
        assert re.search(rf"^ +{worker['worker']} +{worker['pushes']} ", output, re.MULTILINE)
    code, output = finished(
        *["simulate", "-n", "4", *options, "--servers", "2"],
        *["--output", "again", "--replay", "order"],
    )
    assert code == 0, output
    replayed, expected = model_of("again"), model_of("run")
    assert replayed.keys() == expected.keys()
    assert all(np.array_equal(replayed[name], expected[name]) for name in expected)
    again = rows_of("again")[-1]["details"]["workers"]
    assert [worker["staleness"] for worker in again] == [worker["staleness"] for worker in workers]


@pytest.mark.any_mpi
def test_it_goes_on_with_other_servers_and_workers() -> None:
    """From a checkpoint of the warm start, which ends in the third epoch."""
    options = [*USUAL, "--optimizer", "momentum", "--checkpoint-every", "1000"]
    options += ["--distributed-after", "3000"]
    start = ["run", "-n", "3", "--servers", "1", TRAIN, *options, "--epochs", "2"]
    code, output = finished(*start, "--output", "run")
    assert code == 0, output
    code, output = finished(
        *["run", "-n", "5", "--servers", "2", TRAIN, *options],
        *["--epochs", "4", "--resume", "run", "--output", "on"],
    )
    assert code == 0, output
    rows = rows_of("on")
    assert [row["samples"] for row in rows] == [1438 * epoch for epoch in (1, 2, 3, 4)]
    assert rows[2]["test_loss"] < rows[0]["test_loss"]


@pytest.mark.any_mpi
def test_numbers_of_servers_that_differ_are_named(folder: Path) -> None:
    usual, one = [*USUAL, "--output", "none"], ["--servers", "1"]
    (by_rank,) = trainings(folder, [[*usual, *one], [*usual, *one], usual], ranks=3)
    for end in by_rank:
        assert "servers must be the same on all ranks, but differs" in end.said
        assert end.code != 0
    assert not Path("none").exists()
    code, output = finished("run", "-n", "2", "--servers", "1", TRAIN, *USUAL, "--servers", "0")
    assert code != 0
    assert "servers=0 of train.py must be that of `parallel-sgd run`, 1" in output


@pytest.mark.any_mpi
def test_training_that_diverges_ends_workers_and_servers() -> None:
    code, output = finished("run", "-n", "3", TRAIN, *USUAL, "--lr", "1e30", "--output", "run")
    assert code != 0
    assert "is not finite" in output or "has diverged" in output or "too large" in output
    assert "Traceback" not in output


@pytest.mark.any_mpi
def test_roles_of_programs_that_are_started_apart() -> None:
    mpiexec = str(Path(sys.executable).with_name("mpiexec"))
    train = [sys.executable, TRAIN, *USUAL, "--epochs", "2", "--output", "run"]
    server = ["env", "TRAINING_ROLE=PSERVER", *train]
    code, output = executed(
        [mpiexec, "-n", "1", *server, ":", "-n", "2", *train, "--role=worker"],
        environ=ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
    )
    assert code == 0, output
    assert "2 workers and 1 server" in output
    assert [row["epoch"] for row in rows_of("run")] == [1, 2]


LOSING = """
import os, signal, sys, time
import numpy as np
import parallel_sgd as psgd

comm = psgd.Communicator.world(timeout_s=float(sys.argv[1]))
rank = comm.rank  # that of the start: those that are left are numbered anew
parameters = psgd.Parameters({"W": np.zeros(3, np.float32)})
algorithm = psgd.DataParallelASGD(sync_steps=1)
learner = psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, comm)
if not learner.serves:
    for step in range(40):
        if rank == 1 and step == 10 and sys.argv[2] == "exit":
            sys.exit(0)
        if rank == 1 and step == 10 and sys.argv[2] != "nothing":
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        learner.gradient.flat[:] = 1
        learner.step(1)
        if sys.argv[2] == "nothing" and comm.rank:
            time.sleep(0.035 * float(sys.argv[1]))  # worker 0 waits longer than the time limit
learner.finish()
if not learner.serves:
    pushes = [worker["pushes"] for worker in learner.report()["workers"]]
    print("final", parameters.flat[0], pushes, flush=True)
"""


def lose(folder: Path, how: str, timeout_s: float, *options: str) -> tuple[int, str]:
    (folder / "losing.py").write_text(LOSING)
    return finished("run", "-n", "4", *options, "losing.py", str(timeout_s), how)


@pytest.mark.open_mpi
def test_a_worker_that_is_killed_leaves_the_others_at_work_where_mpi_allows(folder: Path) -> None:
    """And they have all of its pushes; whose rank is the first has the first one's duties."""
    code, output = lose(folder, "SIGKILL", 30, "--survive")
    assert code == 0, output
    assert "failed ranks: 1; workers: 2; servers: 1" in output
    assert output.count("final -90.0 [40, 40]") == 2


LATE = """
import os, time
import parallel_sgd.training.learner as setup

say = setup.report_status
if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    setup.report_status = lambda status: (time.sleep(1), say(status))
"""


@pytest.mark.open_mpi
def test_a_worker_may_be_killed_before_others_have_said_that_they_train(folder: Path) -> None:
    """It has trained with them: the job goes on, and does not start anew."""
    (folder / "late.py").write_text(LATE + LOSING)
    code, output = finished("run", "-n", "4", "--survive", "late.py", "30", "SIGKILL")
    assert code == 0 and "starts again in" not in output, output
    assert output.count("final -90.0 [40, 40]") == 2


@pytest.mark.open_mpi
def test_a_server_that_is_killed_is_replaced_by_those_left_where_mpi_allows(folder: Path) -> None:
    """Its values come from a worker's copy; what the others push from then on is not lost."""
    script = LOSING.replace("rank == 1 and step == 10", "False")
    killed = "if learner.serves:\n    import threading\n    threading.Timer(1.0, os.kill, "
    script = script.replace(
        "if not learner.serves:\n    for", f"{killed}(os.getpid(), 9)).start()\nelse:\n    for", 1
    ).replace("learner.gradient", "time.sleep(0.1)\n        learner.gradient", 1)
    (folder / "server.py").write_text(script)
    code, output = finished("run", "-n", "3", "--survive", "server.py", "30", "no")
    assert code == 0, output
    assert "failed ranks: 2; workers: 2; servers: 2" in output
    finals = re.findall(r"final (-[\d.]+) \[40, 40\]", output)
    assert len(finals) == 2 and finals[0] == finals[1] and -80 <= float(finals[0]) <= -78


@pytest.mark.any_mpi
def test_a_worker_that_is_silent_ends_the_job(folder: Path) -> None:
    code, output = lose(folder, "SIGSTOP", 2)
    assert code != 0
    assert "a server has received nothing from the worker on rank 1 for timeout_s=2 s" in output
    assert re.search(r"rank 1 \(pid \d+\) is stopped, by a signal or a debugger", output)
    assert "rank 3 has received nothing from rank 1 for 2 s; this rank is here:" in output


@pytest.mark.any_mpi
def test_a_worker_that_leaves_is_found_by_the_servers_beside_the_others(folder: Path) -> None:
    """Who waits for a server that is there hears it from a server, and not after `timeout_s`."""
    began = time.monotonic()
    code, output = lose(folder, "exit", 600, "--servers", "0")
    assert code == 1 and time.monotonic() - began < 30 * patience(), output
    said = "the program of the worker on rank 1 has ended without learner.finish()"
    assert said in output or "for rank 1, which has finished" in output


@pytest.mark.any_mpi
def test_workers_that_have_finished_may_wait_longer_than_the_time_limit(folder: Path) -> None:
    code, output = lose(folder, "nothing", 5 * patience())  # a busy machine keeps the others, too
    assert code == 0, output
    assert output.count("final -120.0 [40, 40, 40]") == 3


@pytest.mark.any_mpi
def test_the_example_learns_clicks() -> None:
    code, output = finished("run", "-n", "3", "--servers", "1", str(ROOT / "examples/clicks.py"))
    assert code == 0, output
    match = re.search(r"^after [\d.]+ s ([\d.]+)", output, re.MULTILINE)
    assert match
    assert 0.4348 < float(match[1]) < 0.54
