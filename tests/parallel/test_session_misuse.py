"""What is wrong with a session, on one rank or on all: one line, and all ranks end."""

from __future__ import annotations

import errno
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from sessions import SAMPLES, TESTED, data, learner_of, model

import parallel_sgd as psgd
from parallel_sgd.training.session import run_folder

pytestmark = [pytest.mark.threads(1, 3), pytest.mark.ranks(3)]


def refused(comm, message, algorithm=None, objective=None, **options):
    """See that all ranks refuse a session alike, and can go on together."""
    own = model(np.float32)
    options = {"train": data(), "epochs": 2, "objective": objective or own} | options
    refusal = pytest.raises(psgd.UserError, match=re.escape(message))
    with refusal, learner_of(comm, own, algorithm) as learner:
        psgd.TrainingSession(learner=learner, **options).run()
    comm.barrier()


OPTIONS = [
    ({"epochs": 0}, "epochs=0 must be a whole number, at least 1"),
    ({"epochs": 1.5}, "epochs=1.5 must be a whole number"),
    ({"minibatch_size": {10: 4}}, "minibatch_size={10: 4} must begin at 0 samples"),
    ({"minibatch_size": {0: 0}}, "minibatch_size[0]=0 must be a whole number, at least 1"),
    ({"microbatch_size": 0}, "microbatch_size=0 must be"),
    ({"rate_follows": "cubic"}, "rate_follows='cubic' must be one of 'constant', 'linear', 'sqrt'"),
    ({"callbacks": [3]}, "callbacks=[3] must be functions of a row"),
    ({"callbacks": None}, "callbacks=None must be functions of a row, in a list"),
    ({"callbacks": len}, "callbacks=<built-in function len> must be functions of a row, in a list"),
    ({"report": 3}, "report=3 must be a function"),
    ({"started": [].index}, "callback index failed: ValueError"),
    ({"test": data(0)}, "data of test must have at least one sample"),
    ({"validation": data()}, "validation must be a CrossValidation: it is"),
    ({"checkpoints": "folder"}, "checkpoints must be a CheckpointConfig: it is a str"),
    ({"auto_learning_rate": True}, "auto_learning_rate must be an AutoLearningRate: it is a bool"),
    ({"objective": 3}, "objective must be a model of parallel_sgd.models"),
    ({"train": "digits.csv"}, "x='digits.csv' must be an array or a data set"),
    (
        {"auto_minibatch_size": psgd.AutoMinibatchSize(), "minibatch_size": {0: 8, 9: 16}},
        "minibatch_size={0: 8, 9: 16} must be one number if auto_minibatch_size adjusts it",
    ),
    (
        {"validation": psgd.CrossValidation(data=data(), criterion="f1")},
        "criterion='f1' must be one of the metrics: accuracy, loss",
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[message for _, message in OPTIONS])
def test_options_that_are_not_possible(comm, options, message):
    refused(comm, message, **options)


def test_options_that_differ(comm):
    if comm.size > 1:
        refused(comm, "epochs must be the same on all ranks", epochs=1 + comm.rank)
        refused(comm, "minibatch_size must be the same", minibatch_size=8 + comm.rank)
        refused(comm, "number of callbacks must be", callbacks=[print] * comm.rank)


@pytest.mark.threads(3)
@pytest.mark.parametrize("what", ["options", "callback", "validation"])
def test_servers_hear_of_it(comm, what):
    def callback(row):
        raise KeyError("no such thing")

    options, message = {
        "options": (
            {"auto_learning_rate": psgd.AutoLearningRate()},
            "auto_learning_rate must not be given with DataParallelASGD",
        ),
        "callback": ({"callbacks": [callback]}, "callback callback failed: KeyError"),
        "validation": (
            {"validation": psgd.CrossValidation(data=data(), criterion="f1")},
            "criterion='f1' must be one of the metrics",
        ),
    }[what]
    refused(comm, message, algorithm=psgd.DataParallelASGD(servers=1), **options)


def test_a_source_knows_its_own(comm):
    source = psgd.data.Source(data(), minibatch_size=8)
    refused(comm, "minibatch_size=9 must not be given with a source", train=source, epochs=None,
            minibatch_size=9)  # fmt: skip
    refused(comm, "epochs=2 must not be given with a source", train=source)


def last(comm):
    return comm.rank == comm.size - 1


def test_a_callback_that_fails_on_one_rank(comm):
    def callback(row):
        if last(comm):
            raise KeyError("no such thing")

    refused(comm, f"callback callback failed: KeyError: 'no such thing' (on rank {comm.size - 1})",
            callbacks=[callback])  # fmt: skip


def test_a_metric_that_fails_on_one_rank(comm):
    own = model(np.float32)

    def metric(outputs, y):
        return 1 / (0 if last(comm) else 1)

    with learner_of(comm, own) as learner:
        objective = psgd.training.ModelObjective(own, {"mine": metric})
        session = psgd.TrainingSession(
            learner=learner, objective=objective, train=data(), test=data(TESTED)
        )
        with pytest.raises(psgd.UserError, match="metric 'mine' failed: ZeroDivisionError"):
            session.run()


def test_a_bad_sample_on_one_rank(comm):
    """Of what is trained on, and of what is measured."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((SAMPLES, 4)), np.arange(SAMPLES) % 3
    if last(comm):
        x[SAMPLES // 2] = np.nan
    bad = psgd.data.Arrays(x, y)
    refused(comm, f"x[{SAMPLES // 2}][0] = nan is not finite", train=bad)
    y = np.arange(TESTED) % 3
    y[2] = 7
    tested = psgd.data.Arrays(random.standard_normal((TESTED, 4)), y)
    refused(comm, "y[2] = 7 is out of range", test=tested)


def test_no_sample_to_test_on_one_rank(comm):
    message = f"x [0, 4] float32, y int64) is empty (on rank {comm.size - 1})"
    refused(comm, message, test=data(0 if last(comm) else TESTED))


def test_no_sample_to_measure():
    empty = psgd.data.Arrays(np.empty((0, 4)), np.empty(0, np.int64))
    with pytest.raises(psgd.UserError, match="data of validation must have at least one sample"):
        psgd.CrossValidation(data=empty)


@pytest.mark.parametrize("what", ["append_line", "write_whole"])
def test_a_disk_that_is_full(comm, tmp_path, monkeypatch, what):
    """It is as the first rank writes; the others would go on."""
    folder = comm.allgather_object(tmp_path)[0] / what

    def full(name, path, *content, **options):
        if "metrics" in str(path) or "model" in str(path):
            raise psgd.UserError(f"{name}={str(path)!r} cannot be written: No space left on device")
        return right(name, path, *content, **options)

    right = getattr(run_folder, what)
    run = psgd.RunFolder(folder, {})
    comm.barrier()
    with monkeypatch.context() as patched:
        if comm.rank == 0:
            patched.setattr(run_folder, what, full)
        comm.barrier()
        refused(comm, "cannot be written: No space left on device", folder=run)
        comm.barrier()
    comm.barrier()
    assert not list(folder.glob(".*"))


class FullEvents:
    """A writer of TensorBoard's, on a disk that is full: no flush succeeds, nor the last one."""

    def __init__(self, folder):
        self.folder = folder

    def add_scalar(self, *what):
        pass

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    close = flush


@pytest.mark.parametrize("when", ["create", "flush", "close"])
def test_a_disk_that_is_full_for_tensorboard(comm, tmp_path, monkeypatch, when):
    folder = comm.allgather_object(tmp_path)[0] / when

    class Events(FullEvents):
        def __init__(self, folder):
            if when == "create":
                self.flush()
            if when == "close":
                self.flush = lambda: None

    comm.barrier()
    with monkeypatch.context() as patched:
        if comm.rank == 0:
            patched.setattr(run_folder, "require_tensorboard", lambda: Events)
        comm.barrier()
        refused(
            comm,
            f"output='{folder / 'tensorboard'}' cannot be written: No space left on device",
            folder=psgd.RunFolder(folder, tensorboard=True),
        )
        comm.barrier()


def test_without_tqdm(comm, tmp_path, monkeypatch):
    """The folder stays free for the next attempt."""
    folder = comm.allgather_object(tmp_path)[0] / "run"
    comm.barrier()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tqdm", None)
        comm.barrier()
        refused(
            comm, "--no-progress-bar (on rank 0)", folder=psgd.RunFolder(folder), progress_bar=True
        )
        comm.barrier()
    assert not folder.exists()


def test_a_folder_that_is_taken(comm, tmp_path):
    folder = comm.allgather_object(tmp_path)[0]
    (folder / "file").write_text(str(SimpleNamespace()))
    comm.barrier()
    refused(comm, "must be a new or empty folder", folder=psgd.RunFolder(folder))
