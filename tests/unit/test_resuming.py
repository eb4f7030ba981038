"""A job that was started again goes on from its newest checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import files_of_at_most

import parallel_sgd as psgd
from parallel_sgd.communication import chosen_signals, requeue
from parallel_sgd.communication import job_environment as launched

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

SAMPLES = 40


class Killed(BaseException):
    pass


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs one start of a job, of one rank: the program is the same each time."""
    monkeypatch.chdir(tmp_path)

    def start(number: int, *, name: str | None = "this-job", ends_after: int | None = None, **more):
        monkeypatch.setenv(launched.RESTART, str(number))
        if name:
            monkeypatch.setenv(launched.JOB, name)
        x = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)
        own = psgd.models.MLP([4, 3], seed=1)
        comm = psgd.Communicator.single()
        optimizer = psgd.MomentumSGD(lr=0.1)

        def end(row: Any) -> None:
            if row.samples == ends_after:
                raise Killed

        with psgd.Learner(own.parameters, optimizer, psgd.DataParallelSGD(), comm) as learner:
            options = {
                "checkpoints": psgd.CheckpointConfig(folder="run/checkpoints", every=8),
                "folder": psgd.RunFolder("run"),
                "progress_every": 8,
                "callbacks": [end],
            }
            session = psgd.TrainingSession(
                learner=learner,
                objective=own,
                train=psgd.data.Arrays(x, x[:, :3].argmax(1)),
                minibatch_size=8,
                epochs=3,
                **{**options, **more},
            )
            try:
                rows = session.run()
            except Killed:
                return None
        return own.parameters.flat.copy(), [(row.samples, row.train_loss) for row in rows]

    return start


def checkpoints() -> list[str]:
    return sorted(path.name for path in Path("run/checkpoints").iterdir() if path.name.isdecimal())


def whole(job) -> Any:
    """How the program ends without being killed."""
    done = job(0, name="another")
    Path("run").rename("whole")
    return done


def same(one, other) -> bool:
    return np.array_equal(one[0], other[0]) and one[1] == other[1]


def lines() -> list[int]:
    text = Path("run/metrics.jsonl").read_text()
    return [json.loads(line)["samples"] for line in text.splitlines()]


@pytest.mark.parametrize("number", [1, 3])
def test_the_same_program_goes_on(job, number, capsys):
    """With a folder that is not empty any more, and whatever the clock says."""
    expected = whole(job)
    assert job(0, ends_after=72) is None
    for seconds, name in enumerate(checkpoints()):  # the newest by samples is the oldest by time
        os.utime(Path("run/checkpoints", name), (10**9 - seconds,) * 2)
    assert same(job(number), expected)
    assert lines() == [samples for samples, _ in expected[1]]
    said = capsys.readouterr().err
    assert f"restart {number} continues from checkpoint 'run/checkpoints/000000000064'" in said


def test_a_damaged_newest_checkpoint_is_passed_over(job, capsys):
    expected = whole(job)
    assert job(0, ends_after=72) is None
    newest = Path("run/checkpoints", checkpoints()[-1])
    file = newest / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert same(job(1), expected)
    said = capsys.readouterr().err
    assert "parallel-sgd: skipped: checkpoint" in said and "bytes instead of" in said
    assert f"continues from checkpoint 'run/checkpoints/{56:012d}'" in said


@pytest.mark.parametrize(("resume", "before"), [(True, 0), (True, 32), ("run", 32)])
def test_the_only_checkpoint_of_the_job_is_damaged(job, capsys, resume, before):
    """It begins as it has begun: with nothing, or after what another run had left."""
    config = psgd.CheckpointConfig(folder="run/checkpoints", every=8, resume=resume)
    options = {"folder": None, "checkpoints": config}
    if before:
        assert job(0, name="older", ends_after=before + 8, folder=None) is None
    expected = whole_without_folder(job)
    assert job(0, ends_after=before + 16, **options) is None
    newest = Path("run/checkpoints", checkpoints()[-1])
    assert int(newest.name) == before + 8
    file = newest / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    done = job(1, **options)
    assert same(done, expected)
    said = capsys.readouterr().err
    assert "parallel-sgd: skipped: checkpoint" in said and "starts from the beginning" in said


def test_only_what_the_job_itself_has_written(job, capsys):
    """A run that began anew in a folder of old checkpoints does not go on from those."""
    x = {"folder": None}
    assert job(0, name="older", ends_after=112, **x) is None
    expected = whole_without_folder(job)
    assert job(0, ends_after=8, **x) is None  # killed before its first checkpoint
    assert same(job(1, **x), expected)
    assert "starts from the beginning" in capsys.readouterr().err


@pytest.fixture
def loop(tmp_path, monkeypatch):
    """One start of a job whose loop is its own."""
    monkeypatch.chdir(tmp_path)

    def start(
        number: int,
        *,
        ends_after: int = 10**9,
        name: str = "this-job",
        folder: str = "run/checkpoints",
    ):
        monkeypatch.setenv(launched.RESTART, str(number))
        monkeypatch.setenv(launched.JOB, name)
        x = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype(np.float32)
        own = psgd.models.MLP([4, 3], seed=1)
        source = psgd.data.Source(x, x[:, :3].argmax(1), 8, epochs=3)
        learner = psgd.Learner(
            own.parameters,
            psgd.MomentumSGD(lr=0.1),
            psgd.DataParallelSGD(),
            psgd.Communicator.single(),
        )
        with learner, psgd.Checkpoints(folder, keep=9) as saved:
            resumed = psgd.resume(learner, folder)
            for x, y in source.minibatches(learner):
                own.gradient(x, y, out=learner.gradient)
                learner.step(len(x))
                if learner.samples == ends_after:
                    break
                saved.save(learner, background=False)
        return own.parameters.flat.copy(), resumed and resumed.samples

    return start


def test_a_loop_of_ones_own_goes_on(loop, capsys):
    """From what another run has left, too, but not after a restart; nor from what is damaged."""
    assert loop(0, ends_after=24, name="older")[1] is None
    assert loop(0, ends_after=24)[1] == 16
    assert not capsys.readouterr().err
    expected, _ = loop(0)
    shutil.rmtree("run")
    loop(0, ends_after=40, name="older")
    Path("run").rename("old")
    loop(0, ends_after=32)
    shutil.copytree("old/checkpoints/000000000032", "run/checkpoints/000000000032")
    file = Path("run/checkpoints/000000000024/rank-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    flat, resumed = loop(1)
    assert resumed == 16 and np.array_equal(flat, expected)
    assert "continues from checkpoint 'run/checkpoints/000000000016'" in capsys.readouterr().err
    assert len([*Path("run/checkpoints").glob("*.aside")]) == 2


@pytest.mark.parametrize("place", ["a_file", "a_file/checkpoints"])
def test_a_file_in_the_place_of_checkpoints(loop, place):
    Path("a_file").write_text("no folder")
    with pytest.raises(psgd.UserError, match=f"'{place}' must be a folder of checkpoints: Not a"):
        loop(0, folder=place)


def test_a_loop_that_was_lost_before_its_first_checkpoint(loop):
    """It begins again where it has begun: after what another run had left."""
    loop(0, ends_after=24, name="older")
    assert loop(1)[1] == 16


def whole_without_folder(job) -> Any:
    options = psgd.CheckpointConfig(folder="whole")
    return job(0, name="another", folder=None, checkpoints=options)


def test_a_folder_of_another_job_is_not_taken_over(job):
    assert job(0, name="another", ends_after=72) is None
    before = Path("run/metrics.jsonl").read_bytes()
    with pytest.raises(psgd.UserError, match="must be a new or empty folder"):
        job(1)
    assert Path("run/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"job": ' * 5000, "\udcff", "{"])
def test_options_that_cannot_be_read_are_of_another_job(job, text):
    Path("run").mkdir()
    Path("run/options.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(psgd.UserError, match="must be a new or empty folder"):
        job(1)


def test_a_job_killed_as_it_begins_to_write(job):
    expected = whole(job)
    Path("run").mkdir()
    Path("run/.options.json.part").touch()
    assert same(job(1), expected)


def test_a_disk_that_is_full_while_a_checkpoint_is_written(job):
    """An error of the program's own; when there is room again, it goes on from the one before."""
    expected = whole(job)
    assert job(0, ends_after=40) is None
    before = checkpoints()
    with files_of_at_most(150), pytest.raises(psgd.UserError, match="File too large"):
        job(1, folder=None)
    assert checkpoints() == before
    assert same(job(2), expected)


@pytest.mark.parametrize("text", ["SIGKILL", "usr3", ""])
def test_signals_that_cannot_be_notices(text):
    with pytest.raises(psgd.UserError, match="must be of SIGUSR1, SIGUSR2, SIGTERM"):
        chosen_signals(text)


def test_nobody_is_asked_outside_of_slurm(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    requeue()
    assert "this is not a Slurm job" in capsys.readouterr().err
