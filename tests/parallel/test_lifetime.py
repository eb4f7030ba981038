"""What learners, checkpoints and communicators take up is given back, and errors in the background
are told of."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import shared

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, UserError
from parallel_sgd.communication import InBackground, ThreadCommunicator
from parallel_sgd.errors import SharedError
from parallel_sgd.state import wait_for
from parallel_sgd.training import LOCK

ALGORITHMS: dict[str, psgd.Algorithm[Any]] = {
    "in the foreground": psgd.DataParallelSGD(gradient_bits=1),
    "overlap": psgd.DataParallelSGD(overlap=True),
    "double buffering": psgd.DataParallelSGD(double_buffering=True),
    "blocks": psgd.BlockMomentumSGD(sync_steps=2, overlap_samples=4),
    "inner state": psgd.ModelAveragingSGD(sync_steps=2, inner_state="average"),
    "servers": psgd.DataParallelASGD(servers=0, sync_steps=2, pipeline=True),
}

pytestmark = [
    pytest.mark.messages,
    pytest.mark.filterwarnings("ignore:servers=0"),
    pytest.mark.usefixtures("no_waiting_for_the_disk"),
]


def learner_of(name: str, comm: Communicator) -> Learner:
    parameters = psgd.Parameters({"w": np.ones((4, 3), np.float32)})
    return Learner(parameters, psgd.SGD(lr=0.1), ALGORITHMS[name], comm)


def train(learner: Learner, steps: int) -> None:
    for step in range(steps):
        learner.gradient.flat[:] = 1 + step + learner.comm.rank
        learner.ready("w")
        learner.step(samples=1)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_closed_learner(name, finished, comm):
    """What it was stays to be seen; it trains no more."""
    with learner_of(name, comm) as learner:
        train(learner, 3)
        if finished:
            learner.finish()
        wait_for(learner.states)
        before = learner.bytes_sent, learner.samples, learner.parameters.flat.copy()
    assert (learner.bytes_sent, learner.samples) == before[:2]
    assert np.array_equal(learner.parameters.flat, before[2])
    learner.report()
    learner.close()
    for use in (
        lambda: learner.step(1),
        learner.finish,
        learner.meet,
        lambda: train(learner, 1),
    ):
        with pytest.raises(UserError, match="this learner is closed"):
            use()
    with pytest.raises(UserError, match="this learner is closed"):
        psgd.Checkpoints("nowhere").save(learner)
    comm.barrier()


def test_a_gradient_that_no_step_has_taken(comm):
    """An exchange that has begun on some ranks comes to its end on all."""
    with learner_of("overlap", comm) as learner:
        train(learner, 1)
        if comm.rank % 2 == 0:
            learner.gradient.flat.fill(1)
            learner.ready("w")
    for thread in threading.enumerate():
        if thread.name == f"gradient exchange of rank {comm.rank}":
            thread.join(10)
            assert not thread.is_alive()


def test_threads_and_parts_end(comm):
    before = set(threading.enumerate())
    for name in ALGORITHMS:
        for _ in range(3):
            with learner_of(name, comm) as learner:
                train(learner, 2)
    comm.barrier()
    if comm.size == 1:  # threads of other ranks would be counted, too
        ended = time.monotonic() + 10
        while not before.issuperset(threading.enumerate()) and time.monotonic() < ended:
            time.sleep(1e-3)
        assert before.issuperset(threading.enumerate())
    if isinstance(comm, ThreadCommunicator):
        assert comm._world._subworlds == {}


def test_an_error_that_others_do_not_have_is_not_held_up(comm):
    """Leaving a block by it waits for nobody; by one that all share, all is given back."""
    learner = learner_of("blocks", comm)
    if comm.rank == 0:
        with pytest.raises(KeyError), learner:
            raise KeyError("alone")
    for _ in range(2):
        other = learner_of("blocks", comm)
        train(other, 1)
        with pytest.raises(SharedError, match="all"), other:
            comm.raise_together("all")
        with pytest.raises(UserError, match="closed"):
            other.step(samples=1)
    with pytest.raises(SharedError), comm.duplicate() as apart:
        apart.raise_together("all")
    with pytest.raises(UserError, match="this communicator is closed"):
        apart.barrier()
    apart.close()


def failing(comm: Communicator, disk: dict[str, Any]) -> threading.Event:
    """From now on the last rank's disk is full, once the event is set."""
    go = threading.Event()

    def full(right: Any, part: Path, rank: int, *arguments: Any) -> Any:
        assert go.wait(20)
        if rank == comm.size - 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return right(part, rank, *arguments)

    comm.barrier()
    disk["write_rank"] = full
    comm.barrier()
    return go


@pytest.mark.parametrize("name", ["in the foreground", "blocks", "servers"])
def test_a_checkpoint_that_fails_ends_training(name, on_ranks, tmp_path, disk):
    """The next step says so on all ranks, whichever of them knows it first."""

    def body(comm: Communicator) -> None:
        folder = shared(comm, tmp_path)
        learner, checkpoints = learner_of(name, comm), psgd.Checkpoints(folder)
        train(learner, 1)
        events.append(failing(comm, disk))
        checkpoints.save(learner)
        comm.barrier()
        for event in events:
            event.set()
        if comm.rank == comm.size - 1:
            assert checkpoints._writing is not None
            checkpoints._writing._ended.wait(20)
        with pytest.raises(UserError, match=rf"No space left on device \(on rank {comm.size - 1}"):
            train(learner, 100_000)  # workers at their own paces hear of it in one of them
        with pytest.raises(UserError, match="No space left on device"):
            checkpoints.close()
        checkpoints.close()
        with pytest.raises(UserError, match=r"Checkpoints\(.*\) is closed"):
            checkpoints.save(learner)
        assert {path.name for path in folder.iterdir()} <= {LOCK}
        learner._close(failed=True)

    events: list[threading.Event] = []
    on_ranks(body)


def test_loading_waits_for_what_is_being_written(on_ranks, tmp_path, disk):
    """Also where an older one is there, and where another object of this process writes."""

    def publish(right: Any, *arguments: Any) -> None:
        time.sleep(0.2)
        right(*arguments)

    disk["publish"] = publish

    def body(comm: Communicator) -> None:
        folder = shared(comm, tmp_path) / "run"
        with learner_of("in the foreground", comm) as learner:
            for step in range(2):
                train(learner, 1)
                psgd.Checkpoints(folder / "checkpoints").save(learner, extra=step)
                other = learner_of("in the foreground", comm)
                where = folder if step else folder / "checkpoints"
                assert psgd.load_checkpoint(other, where).extra == step
                assert other.samples == learner.samples
                other.close()
            comm.barrier()

    on_ranks(body)


def test_loading_says_what_went_wrong_in_the_writing(comm, tmp_path, disk):
    folder = shared(comm, tmp_path)
    learner, checkpoints = learner_of("in the foreground", comm), psgd.Checkpoints(folder)
    checkpoints.save(learner)
    checkpoints.wait()
    failing(comm, disk).set()
    comm.barrier()
    train(learner, 1)
    learner.meet()
    checkpoints.save(learner)
    with pytest.raises(UserError, match="No space left on device"):
        psgd.load_checkpoint(learner, folder)
    comm.barrier()
    psgd.load_checkpoint(learner, folder)  # the older one, now that it is known
    assert learner.samples == 0
    with pytest.raises(UserError, match="No space left on device"):
        checkpoints.wait()


def test_the_background_lets_go_of_what_it_worked_with():
    background = InBackground("nothing", lambda: 1)
    assert background.result() == 1
    assert background._function is None
