"""One process at a time writes to a folder, and however it ends another one can."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd import UserError
from parallel_sgd.communication import FOLDER, JOB, RESTART, SURVIVE
from parallel_sgd.training import LOCK, FolderLock, RunFolder
from parallel_sgd.training.checkpoint import folder_lock
from parallel_sgd.training.checkpoint.files import set_aside_after

HOLDS = """
import sys
from pathlib import Path
from parallel_sgd.training import FolderLock
lock = FolderLock("output", Path(sys.argv[1]))
lock.hold()
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(folder_lock, "_FREED_S", 0.2)


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock of ``run``."""
    environ = {**os.environ, JOB: "a-job", RESTART: "0", FOLDER: "/of/this/launch"}
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def learner():
    model = psgd.models.SoftmaxRegression(4, 3)
    comm = psgd.Communicator.single()
    return psgd.Learner(model.parameters, psgd.SGD(lr=0.5), psgd.DataParallelSGD(), comm)


def test_who_holds_it_is_said_and_the_end_of_a_killed_one_frees_it(tmp_path, other):
    run = tmp_path / "run"
    holder = rf"process {other.pid} on host \S+ has been writing there since 20"
    said = rf"^output='{run}' is in use: {holder}"
    folder = RunFolder(run, {}, resumed=True)
    for take in (folder.hold, folder.create, lambda: folder.append_metrics({"samples": 1})):
        with pytest.raises(UserError, match=said):
            take()
    with psgd.Checkpoints(run) as checkpoints, pytest.raises(UserError, match="is in use: process"):
        checkpoints.save(learner(), background=False)
    with pytest.raises(UserError, match="is in use: process"):
        psgd.training.resume(learner(), run)
    config = psgd.CheckpointConfig(folder=run, resume=True)
    session = psgd.TrainingSession(
        learner=learner(),
        objective=psgd.models.SoftmaxRegression(4, 3),
        train=psgd.data.Arrays(np.eye(4), np.array([0, 1, 2, 0])),
        minibatch_size=2,
        epochs=1,
        checkpoints=config,
    )
    with pytest.raises(UserError, match="is in use: process"):
        session.run()
    assert os.listdir(run) == [LOCK]
    other.kill()
    other.wait()
    folder.create()
    assert json.loads((run / LOCK).read_text())["process"] == os.getpid()
    folder.close()
    assert LOCK not in os.listdir(run)


def _refuses(error, *, below):
    """An `os.open` that makes and writes no file there: root may do so everywhere."""

    def opened(path, flags, *mode, right=os.open, **options):
        if flags & os.O_CREAT and str(path).startswith(str(below)):
            raise OSError(error, os.strerror(error), str(path))
        return right(path, flags, *mode, **options)

    return opened


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_cannot_be_written_to_can_be_resumed_from(tmp_path, monkeypatch, error):
    with psgd.Checkpoints(tmp_path) as checkpoints:
        trained = learner()
        trained.step(samples=4)
        checkpoints.save(trained)
    monkeypatch.setattr(folder_lock.os, "open", _refuses(error, below=tmp_path))
    for restart in ("0", "1"):
        monkeypatch.setenv(JOB, "a-job")
        monkeypatch.setenv(RESTART, restart)
        assert psgd.resume(learner(), tmp_path).samples == 4
    with pytest.raises(UserError, match="cannot be written: "):
        psgd.Checkpoints(tmp_path).hold()
    with psgd.Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match="written"):
        checkpoints.save(learner(), background=False)


def test_to_copy_the_folder_does_not_free_it(tmp_path):
    run = tmp_path / "run"
    with FolderLock("output", run):
        shutil.copytree(run, tmp_path / "copy")
        at_once = (
            "from parallel_sgd.training.checkpoint import folder_lock; folder_lock._FREED_S = 0.1"
        )
        command = [sys.executable, "-c", at_once + HOLDS, run]
        told = subprocess.run(command, capture_output=True, text=True)
        assert "is in use: process" in told.stderr and told.stdout == ""
    FolderLock("output", tmp_path / "copy").hold()


def test_it_is_held_until_the_last_write(tmp_path):
    class Events:
        def close(self):
            assert LOCK in os.listdir(tmp_path)
            raise OSError(errno.ENOSPC, "No space left on device")

    folder = RunFolder(tmp_path, {})
    folder.create()
    folder._events = Events()
    with pytest.raises(UserError, match="No space left"):
        folder.close()
    assert LOCK not in os.listdir(tmp_path)


def test_a_later_start_of_the_same_job_takes_it_over(tmp_path, other, monkeypatch):
    """A host that is lost may hold it for ever, as a server of NFS sees it."""
    lock = FolderLock("output", tmp_path / "run")
    for job, restart in (("a-job", "0"), ("another", "1")):
        monkeypatch.setenv(JOB, job)
        monkeypatch.setenv(RESTART, restart)
        with pytest.raises(UserError, match="is in use"):
            lock.hold()
    monkeypatch.setenv(JOB, "a-job")
    with lock:
        assert json.loads((tmp_path / "run" / LOCK).read_text())["process"] == os.getpid()


def test_a_survivor_takes_it_over_from_a_rank_whose_host_is_lost(tmp_path, other, monkeypatch):
    """Not on the same host, where the kernel would have freed it; nor from another job."""
    here, lock = socket.gethostname(), FolderLock("output", tmp_path / "run")
    file = tmp_path / "run" / LOCK
    holder = json.loads(file.read_text())
    for launch, survive, host in (
        ("/of/this/launch", "1", here),
        ("/of/another", "1", "another"),
        ("/of/this/launch", "0", "another"),
        ("/of/this/launch", "1", "another"),
    ):
        monkeypatch.setenv(FOLDER, launch)
        monkeypatch.setenv(SURVIVE, survive)
        file.write_text(json.dumps({**holder, "host": host}))
        if (launch, survive, host) != ("/of/this/launch", "1", "another"):
            with pytest.raises(UserError, match="is in use"):
                lock.hold()
    with lock:
        assert json.loads((tmp_path / "run" / LOCK).read_text())["process"] == os.getpid()


def _sees(folder, ends):
    """In a child that was forked: its exit code is the number of wrong things."""
    with pytest.raises(UserError, match="is in use"):
        FolderLock("output", folder).hold()
    ends.wait()


def test_a_process_holds_it_until_its_last_user_gives_it_back_and_its_children_do_not(tmp_path):
    one, two = (FolderLock("output", tmp_path) for _ in range(2))
    one.hold()
    two.hold()
    two.hold()
    two.release()
    context = multiprocessing.get_context("fork")
    ends = context.Event()
    child = context.Process(target=_sees, args=(tmp_path, ends))
    child.start()
    ends.wait(0.5)
    one.release()
    assert LOCK not in os.listdir(tmp_path)
    done = subprocess.run([sys.executable, "-c", HOLDS, str(tmp_path)], input="", text=True)
    assert done.returncode == 0  # though the child, which was forked while it was held, lives
    assert child.is_alive()
    ends.set()
    child.join(10)
    assert child.exitcode == 0


ENDS = """
import errno, os, sys, time
import parallel_sgd as psgd
from parallel_sgd.communication import program_ends
from parallel_sgd.training.checkpoint import files as checkpoint_files, folder_lock

write_rank = checkpoint_files.write_rank


def late(part, *arguments):
    while not program_ends():  # its exit handlers have begun
        time.sleep(0.005)
    held = folder_lock.LOCK in os.listdir(part.parent)
    print("writes,", "held" if held else "not held", flush=True)
    if part.parent.name == "no space":
        raise OSError(errno.ENOSPC, "No space left on device")
    return write_rank(part, *arguments)


def begins(name):
    parameters = psgd.models.SoftmaxRegression(4, 3).parameters
    comm = psgd.Communicator.single()
    learner = psgd.Learner(parameters, psgd.SGD(lr=0.5), psgd.DataParallelSGD(), comm)
    checkpoints = psgd.Checkpoints(name)
    if name == "its second":
        checkpoints.save(learner, background=False)
    if name == "a block that an error ends":
        with checkpoints:
            checkpoint_files.write_rank = late
            checkpoints.save(learner)
            raise ValueError("an error")
    checkpoint_files.write_rank = late
    checkpoints.save(learner)
    if name == "not collected":
        sys.checkpoints = checkpoints  # until there is no Python any more
    if name == "an exit code":
        sys.exit(3)
    if name == "an error":
        raise ValueError("an error")


for name in sys.argv[1:]:
    sys.stdout.flush()
    if not (child := os.fork()):
        begins(name)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"{name}: {code}, {os.listdir(name)}", flush=True)
"""


def test_a_program_holds_it_until_its_last_write_in_the_background(tmp_path):
    """However it ends without `close`; then the file is gone."""
    ends = {
        "its first": "0, [CHECKPOINT]",
        "its second": "0, [CHECKPOINT]",  # of the same samples
        "not collected": "0, [CHECKPOINT]",
        "an exit code": "3, [CHECKPOINT]",
        "an error": "1, [CHECKPOINT]",
        "a block that an error ends": "1, [CHECKPOINT]",
        "no space": "1, []",
    }
    command = [sys.executable, "-c", ENDS, *ends]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = re.sub(r"'0{12}(-1)?'", "CHECKPOINT", told.stdout).splitlines()
    assert lines[::2] == ["writes, held"] * len(ends), told
    assert lines[1::2] == [f"{name}: {end}" for name, end in ends.items()]


def test_a_write_holds_it_when_its_block_was_left_by_an_error(tmp_path, disk):
    """Not the object, which nobody closes any more."""
    goes_on = threading.Event()

    def late(right, *arguments):
        goes_on.wait(30)
        return right(*arguments)

    disk["write_rank"] = late
    checkpoints = psgd.Checkpoints(tmp_path)
    with contextlib.suppress(KeyError), checkpoints:
        checkpoints.save(learner())
        raise KeyError
    held = LOCK in os.listdir(tmp_path)
    goes_on.set()
    checkpoints._writing.wait()
    assert held and checkpoints.latest() is not None
    assert LOCK not in os.listdir(tmp_path)


def _takes_it_itself(folder, lock, other, together):
    """In a child that was forked, whose parent holds it by both objects."""
    with pytest.raises(UserError, match="is in use"):
        lock.hold()
    together.wait()  # the parent gives it back
    together.wait()
    lock.hold()
    other.release()
    again = lock.hold_again()
    lock.release()
    assert json.loads((folder / LOCK).read_text())["process"] == os.getpid()
    again.release()
    assert LOCK not in os.listdir(folder)


def test_a_child_that_was_forked_has_no_hold_of_its_parents(tmp_path):
    lock, other = FolderLock("output", tmp_path), FolderLock("output", tmp_path)
    lock.hold()
    other.hold()
    context = multiprocessing.get_context("fork")
    together = context.Barrier(2, timeout=10)
    child = context.Process(target=_takes_it_itself, args=(tmp_path, lock, other, together))
    child.start()
    together.wait()
    lock.release()
    other.release()
    together.wait()
    child.join(10)
    assert child.exitcode == 0


def test_a_file_that_nobody_holds_keeps_nobody_out(tmp_path):
    (tmp_path / LOCK).write_text('{"host": "gone", "process": 7}')
    RunFolder(tmp_path, {}).create()


def test_checkpoints_are_set_aside_also_where_the_one_to_go_on_from_was_removed(tmp_path):
    for samples in (10, 30):
        (tmp_path / f"{samples:012d}").mkdir()
    set_aside_after(tmp_path / f"{20:012d}")
    assert sorted(os.listdir(tmp_path)) == [f"{10:012d}", f"{30:012d}.aside"]
