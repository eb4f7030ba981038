"""Jobs and programs that are killed: what they leave behind can be taken up, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from jobs import PARALLEL_SGD, SECONDS, TRAIN, executed, finished, started, trainings, within

OPTIONS = [
    *["--algorithm", "block-momentum", "--block-samples", "640", "--gradient-bits", "1"],
    *["--optimizer", "momentum", "--hidden", "64", "--epochs", "5", "--no-plot"],
    *["--checkpoint-every", "300"],
]


def run_line(*arguments: str, ranks: int) -> list[str]:
    return ["run", "-n", str(ranks), TRAIN, *OPTIONS, *arguments]


def run(*arguments: str, ranks: int = 3) -> tuple[int, str]:
    """Exit code and all output of a training run."""
    return finished(*run_line(*arguments, ranks=ranks))


def checkpoints(run: str) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(p.name for p in Path(run, "checkpoints").iterdir() if p.name.isdecimal())
    return []


def metrics(run: str) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, but for the seconds."""
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name != "seconds"} for row in rows]


@pytest.mark.any_mpi
def test_a_killed_job_goes_on_as_if_nothing_had_been(folder: Path) -> None:
    """Killed twice; the same model and the same metrics as without."""
    code, output = run("--output", "whole")
    assert code == 0, output
    arguments = ("--output", "killed")
    for _ in range(2):
        seen = checkpoints("killed")
        with started([*PARALLEL_SGD, *run_line(*arguments, ranks=3)]) as job:
            assert within(SECONDS, lambda seen=seen: len({*checkpoints("killed")} - {*seen}) >= 3)
            assert job.poll() is None, "it was killed too late to show anything"
        assert not Path("killed/model.npz").exists(), "it was killed too late to show anything"
        arguments = ("--resume", "killed")
    code, output = run("--resume", "killed")
    assert code == 0, output
    assert metrics("killed") == metrics("whole")
    with np.load("whole/model.npz") as whole, np.load("killed/model.npz") as killed:
        assert all(np.array_equal(whole[name], killed[name]) for name in whole)
    assert not list(Path("killed/checkpoints").glob("*.part"))


@pytest.mark.any_mpi
def test_other_ranks_and_what_is_refused(folder: Path) -> None:
    code, output = run("--output", "run", "--epochs", "2")
    assert code == 0, output
    shutil.copytree("run", "fewer")
    code, output = run("--resume", "fewer", ranks=2)
    assert code == 0, output
    assert "2 ranks" in output
    rows = metrics("fewer")
    first, last = metrics("run")  # the last row is of the model after the last synchronization
    assert (rows[0], rows[1]["train_loss"]) == (first, last["train_loss"])
    assert (rows[-1]["epoch"], rows[-1]["samples"]) == (5, 5 * 1438)
    assert rows[-1]["test_loss"] < rows[1]["test_loss"]

    earlier = Path("run/checkpoints", checkpoints("run")[-2])
    before = everything_in("run")
    ends = trainings(folder, [*OPTIONS, "--resume", str(earlier), "--seed", "1"], ranks=3)
    assert everything_in("run") == before
    for rank, end in enumerate(ends[0]):
        assert end.code != 0
        assert end.shared
        line = rf"\[rank {rank}\] parallel-sgd: error: .*its seed was 0, and is 1.*\n"
        assert re.fullmatch(line, end.said), end.said


def everything_in(run: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


KILLED = '''
"""Forks programs that save without end, kills each, and looks at what it has left."""
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
import parallel_sgd as psgd
from parallel_sgd.state import across

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
flush = os.fsync


def learner_of():
    parameters = psgd.Parameters({"w": np.zeros((200, 50), np.float32)})
    algorithm = psgd.ModelAveragingSGD(sync_steps=1, gradient_bits=16)
    return psgd.Learner(parameters, psgd.SGD(lr=1.0), algorithm, psgd.Communicator.single())


def go_on(ready):
    learner, checkpoints = learner_of(), psgd.Checkpoints(folder, keep=2)
    first = checkpoints.latest()
    if first:
        psgd.load_checkpoint(learner, folder)
    while True:
        learner.gradient.flat.fill(-2)
        learner.step(samples=2)
        step = learner.samples // 2
        checkpoints.save(learner, {"step": step}, metric=-step, background=step % 2 > 0)
        if checkpoints.latest() != first:  # however slow the machine, each adds one
            os.write(ready, b".")


def check(least):
    learner = learner_of()
    loaded = psgd.load_checkpoint(learner, folder)
    step = loaded.extra["step"]
    assert learner.samples == 2 * step == loaded.samples == 2 * learner.local_step.state.steps
    assert (learner.parameters.flat == step).all() and (learner.state.start == step).all()
    assert step >= least, "a checkpoint that was there is gone"
    return step


warm = learner_of()  # kernels are loaded here, once for all
warm.gradient.flat.fill(1)
warm.step(samples=1)
psgd.Checkpoints(folder / "warm").save(warm, background=False)
go, partial, step = random.Random(0), 0, 0
for number in range(kills):
    os.fsync = flush if number % 10 == 0 else (lambda descriptor: None)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            go_on(write)
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 1), "the program has failed"
    time.sleep(go.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    partial += any(path.suffix == ".part" for path in folder.iterdir())
    step = check(step)
print(partial, step)
'''


@pytest.mark.any_mpi
def test_a_program_killed_while_it_writes(folder: Path) -> None:
    """30 times, at random moments of a loop that does nothing else."""
    Path("killed.py").write_text(KILLED)
    code, output = executed([sys.executable, "killed.py", "checkpoints", "30"])
    assert code == 0, output
    partial, step = map(int, output.splitlines()[-1].split())  # before it, of kernels
    assert partial >= 5, "too few were killed while they wrote"
    assert step >= 30
