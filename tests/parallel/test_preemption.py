"""All ranks leave together where one is asked to, and what they have saved goes on bit for bit."""

from __future__ import annotations

import json
import os
import threading

import numpy as np
import pytest
from sessions import SAMPLES, SIZE, data, learner_of, model, without_seconds

import parallel_sgd as psgd
from parallel_sgd.communication import job_environment as launched
from parallel_sgd.errors import Preempted
from parallel_sgd.training.session import preemption

pytestmark = [pytest.mark.threads(3), pytest.mark.ranks(3)]

ALGORITHMS = {
    "data-parallel": psgd.DataParallelSGD(gradient_bits=1),
    "double buffering": psgd.DataParallelSGD(double_buffering=True),
    "blocks": psgd.BlockMomentumSGD(sync_steps=4, gradient_bits=4),
    "warm start": psgd.DataParallelSGD(distributed_after=2 * SAMPLES),
}


@pytest.fixture
def asked(monkeypatch):
    """Says of one rank, by its communicator, that it is to leave after so many samples."""
    monkeypatch.setenv(launched.PREEMPT_ON, "SIGUSR2")
    here = threading.local()
    for name, value in {
        "listen": lambda: None,
        "EVERY_S": 1e-9,  # they ask after every step
        "EVERY_SELDOM_S": 1e-9,
        "preemption_requested": lambda: here.asked(),
    }.items():
        monkeypatch.setattr(preemption, name, value)

    def ask(learner, after: int, rank: int = 1) -> None:
        here.asked = lambda: learner.comm.rank == rank and learner.samples >= after

    return ask


def session(comm, own, learner, saved, **options):
    given = {
        "train": data(),
        "minibatch_size": SIZE,
        "epochs": 3,
        "validation": psgd.CrossValidation(data=data(7, 1)),
        "checkpoints": psgd.CheckpointConfig(folder=saved, resume=True),
    }
    return psgd.TrainingSession(learner=learner, objective=own, **{**given, **options})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_goes_on_bit_for_bit(comm, tmp_path, asked, name):
    folder = comm.allgather_object(str(tmp_path))[0]
    ends = []
    for stops in (None, 2 * SIZE, SAMPLES + SIZE, None):
        own = model(np.float32)
        with learner_of(comm, own, ALGORITHMS[name], psgd.MomentumSGD(lr=0.05)) as learner:
            asked(learner, 10**9 if stops is None else stops)
            whole = stops is None and not ends
            where = f"{folder}/{'whole' if whole else 'asked'}"
            if stops is not None:
                with pytest.raises(Preempted) as error:
                    session(comm, own, learner, where).run()
                assert error.value.code == 75 and learner.samples == stops
                assert f"{stops:012d}" in os.listdir(where)
                continue
            rows = session(comm, own, learner, where).run()
            ends.append((own.parameters.flat.copy(), without_seconds(rows)))
    (flat, rows), (again, same) = ends
    assert np.array_equal(flat, again) and rows == same
    assert not np.array_equal(flat, model(np.float32).parameters.flat)


def test_the_run_folder_says_so(comm, tmp_path, asked):
    folder = comm.allgather_object(tmp_path)[0]
    own = model(np.float32)
    with learner_of(comm, own) as learner:
        asked(learner, SIZE)
        with pytest.raises(Preempted):
            session(
                comm, own, learner, folder / "saved", folder=psgd.RunFolder(folder / "run")
            ).run()
    comm.barrier()
    assert json.loads((folder / "run" / "status.json").read_text())["status"] == "preempted"
    assert "Can be resumed" in (folder / "run" / "report.html").read_text()


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.parametrize("servers", [0, 1])
def test_asynchronous_workers_and_their_servers(comm, tmp_path, asked, servers):
    """Only one worker is asked: servers hear of it, too."""
    folder = comm.allgather_object(str(tmp_path))[0]
    own = model(np.float32)
    algorithm = psgd.DataParallelASGD(servers=servers, sync_period=SIZE)
    with learner_of(comm, own, algorithm) as learner:
        asked(learner, SAMPLES)
        with pytest.raises(Preempted):
            session(comm, own, learner, folder).run()
        assert learner.serves == (servers == 1 and comm.rank == 2)
    with learner_of(comm, own, algorithm) as learner:
        asked(learner, 10**9)
        session(comm, own, learner, folder).run()
        assert learner.serves or learner.samples == 3 * SAMPLES


@pytest.mark.parametrize("asks", [True, False], ids=["whether to leave", "for the time"])
def test_a_rank_that_fails_in_a_block_is_not_waited_for(comm, tmp_path, asked, monkeypatch, asks):
    """The others, who train alone for a while, ask each other in between."""
    if not asks:
        monkeypatch.delenv(launched.PREEMPT_ON, raising=False)
    own = model(np.float32)
    folder = comm.allgather_object(str(tmp_path))[0]
    checkpoints = psgd.CheckpointConfig(folder=folder, every_s=None if asks else 1e-9)
    with learner_of(comm, own, psgd.BlockMomentumSGD(sync_steps=10)) as learner:
        asked(learner, 10**9)

        class Failing(psgd.training.ModelObjective):
            def backward(self, learner, pieces):
                if comm.rank == 1 and learner.samples == SIZE:
                    learner.fail("bad data")
                return super().backward(learner, pieces)

        with pytest.raises(psgd.UserError, match=r"^bad data \(on rank 1\)$"):
            psgd.TrainingSession(
                learner=learner,
                objective=Failing(own),
                train=data(),
                minibatch_size=SIZE,
                checkpoints=checkpoints,
            ).run()


@pytest.mark.threads(1)  # of more, not all would be those of a job
def test_a_session_without_checkpoints_is_refused(comm, asked):
    own = model(np.float32)
    with learner_of(comm, own) as learner:
        asked(learner, 0)
        with pytest.raises(psgd.UserError, match="checkpoints=None must be a CheckpointConfig"):
            session(comm, own, learner, "unused", checkpoints=None).run()


def test_without_the_option_nobody_asks(comm, monkeypatch):
    monkeypatch.delenv(launched.PREEMPT_ON, raising=False)
    with learner_of(comm, model(np.float32)) as learner:
        asked = preemption.Preemption(learner, saves=True)
        learner.comm.allgather_object = None
        try:
            assert not any(asked.stepped() for _ in range(100))
        finally:
            del learner.comm.allgather_object
