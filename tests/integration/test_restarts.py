"""Jobs that are killed and go on by themselves, and jobs that are asked to leave."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from jobs import ENVIRONMENT, PARALLEL_SGD, SECONDS, TRAIN, descendants, finished, started, within

OPTIONS = [
    *["--algorithm", "block-momentum", "--block-samples", "640", "--gradient-bits", "1"],
    *["--optimizer", "momentum", "--hidden", "64", "--epochs", "20", "--no-plot"],
    *["--checkpoint-every", "300"],
]  # epochs for seconds of training after each checkpoint: a kill must not come too late


def ranks_of(launcher: int) -> list[int]:
    """The processes of its ranks."""
    found = []
    for pid in descendants(launcher):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"-m", b"parallel_sgd.launcher.rank"]:
                found.append(pid)
    return found


def checkpoints(run: str) -> set[str]:
    with suppress(FileNotFoundError):
        return {path.name for path in Path(run, "checkpoints").iterdir() if path.name.isdecimal()}
    return set()


def same_model(one: str, other: str) -> bool:
    with np.load(f"{one}/model.npz") as a, np.load(f"{other}/model.npz") as b:
        return all(np.array_equal(a[name], b[name]) for name in a)


def test_a_job_that_is_killed_goes_on_by_itself(folder: Path) -> None:
    """First one rank, then mpiexec and all of them at once: the model of a run without."""
    code, output = finished("simulate", "-n", "3", *OPTIONS, "--output", "whole")
    assert code == 0, output
    run = [*PARALLEL_SGD, "run", "-n", "3", "--restarts", "5", "--timeout-s", "120"]
    moments = random.Random()
    with started([*run, TRAIN, *OPTIONS, "--output", "killed"]) as job:
        for done, all_of_them in enumerate((False, True)):
            # The ranks that were killed may have written one more.
            begun = lambda done=done: f"restart {done} of 5" in Path("output").read_text()  # noqa: E731
            assert done == 0 or within(SECONDS, begun)
            seen = checkpoints("killed")
            new = lambda seen=seen: checkpoints("killed") - seen  # noqa: E731
            assert within(SECONDS, lambda new=new: new() or job.poll() is not None)
            time.sleep(moments.uniform(0, 0.02))
            assert job.poll() is None, "it was killed too late to show anything"
            below = [*descendants(job.pid)][1:]
            for pid in below if all_of_them else ranks_of(job.pid)[-1:]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert within(3 * SECONDS, lambda: job.poll() is not None)
    output = Path("output").read_text()
    assert job.returncode == 0, output
    assert "restart 2 of 5 in" in output and "from checkpoint '" in output
    assert same_model("whole", "killed")
    assert not list(Path("killed/checkpoints").glob("*.part"))


STOPPED = """
import os, signal, sys, time
import parallel_sgd as psgd

started = int(os.environ["PARALLEL_SGD_RESTART"])
comm = psgd.Communicator.world(timeout_s=60 if started else 3)
if comm.rank == 1 and started == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
comm.barrier()
if comm.rank == 1 and started == 1:
    raise psgd.UserError("lr=-1.0 must be more than 0")
comm.barrier()
"""


@pytest.mark.any_mpi
def test_a_silent_rank_is_a_reason_and_an_error_of_the_program_is_none(folder: Path) -> None:
    (folder / "stopped.py").write_text(STOPPED)
    code, output = finished("run", "-n", "3", "--restarts", "5", "stopped.py")
    assert code == 1, output
    assert "waited more than timeout_s=3 s" in output
    assert "a rank was unresponsive or has failed" in output and "restart 1 of 5 in 1 s" in output
    assert "lr=-1.0 must be more than 0" in output and "restart 2" not in output
    assert "the program has failed with an error" in output


SESSION = """
import os, signal, sys
import numpy as np
import parallel_sgd as psgd

comm = psgd.Communicator.world(timeout_s=30)
rank = comm.rank  # that of the start: those that are left are numbered anew
model = psgd.models.MLP([4, 3], seed=1)
x = np.random.default_rng(0).standard_normal((400, 4)).astype(np.float32)
algorithm = psgd.DataParallelASGD(sync_steps=1)
with psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm) as learner:
    class Losing(psgd.training.ModelObjective):
        def backward(self, learner, pieces):
            if rank == int(sys.argv[1]) and learner.samples > 200:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().backward(learner, pieces)

    session = psgd.TrainingSession(
        learner=learner,
        objective=Losing(model),
        train=psgd.data.Arrays(x, x[:, :3].argmax(1)),
        minibatch_size=12,
        epochs=2,
        folder=psgd.RunFolder("run"),
    )
    session.run()
"""


@pytest.mark.open_mpi
def test_the_model_is_written_by_those_that_are_left(folder: Path) -> None:
    """The first worker, who would write it, dies: the job is complete with another's."""
    (folder / "session.py").write_text(SESSION)
    code, output = finished("run", "-n", "4", "--survive", "session.py", "0")
    assert code == 0, output
    assert "failed ranks: 0; workers: 2; servers: 1" in output
    assert Path("run/model.npz").exists()


@pytest.mark.parametrize("to", ["launcher", pytest.param("one rank", marks=pytest.mark.any_mpi)])
def test_a_job_that_is_asked_to_leave(folder: Path, to: str) -> None:
    """It saves, ends with code 75, and goes on where it is started again under its name."""
    name = "SIGTERM" if to == "launcher" else "SIGUSR2"
    run = [*PARALLEL_SGD, "run", "-n", "3", "--preempt-on", name, "--restarts", "3"]
    train = [TRAIN, "--hidden", "16", "--no-plot", "--checkpoint-every", "100000"]
    environ = ENVIRONMENT | {"PARALLEL_SGD_JOB": "mine"}
    command = [*run, *train, "--output", "run", "--epochs"]
    with started([*command, "100000"], environ=environ) as job:
        assert within(SECONDS, lambda: " train loss " in Path("output").read_text())
        pid = job.pid if to == "launcher" else ranks_of(job.pid)[1]
        os.kill(pid, signal.Signals[name])
        assert within(SECONDS, lambda: job.poll() is not None)
    output = Path("output").read_text()
    assert job.returncode == 75, output
    match = re.search(r"preempted: all state is saved after (\d+) samples", output)
    assert match and f"{int(match[1]):012d}" in checkpoints("run")
    assert "Traceback" not in output and "restart" not in output.partition("asked to leave")[2]
    epochs = int(match[1]) // 1438 + 2
    environ["PARALLEL_SGD_RESTART"] = "1"
    with started([*command, str(epochs)], environ=environ) as job:
        assert within(SECONDS, lambda: job.poll() is not None)
    output = Path("output").read_text()
    assert job.returncode == 0, output
    assert f"restart 1 continues from checkpoint 'run/checkpoints/{int(match[1]):012d}'" in output
    assert Path("run/model.npz").exists()
