"""An asynchronous run is repeated bit for bit from the order in which its servers answered."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from served_training import (
    asynchronous,
    few_samples_of,
    finished,
    learner_of,
    put_gradient,
    servers_of,
)

from parallel_sgd import SGD, Communicator, MomentumSGD, UserError, simulate
from parallel_sgd.parameter_server import RecordedOrder

RUNS = {
    "async": {},
    "async, beside": {"servers": 0, "gradient_bits": 1, "block_size": 16},
    "bounded": {"mode": "bounded", "staleness": 1},
    "geo, period": {"mode": "geo", "sync_steps": 2},
    "pipeline": {"pipeline": True},
    "sync": {"mode": "sync"},
    "compensated, 2 servers": {"servers": 2, "delay_compensation": 0.1},
}

every_run = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.filterwarnings("ignore:servers=0"))
        if "beside" in name
        else name
        for name in RUNS
    ],
)

Outcome = tuple[bytes, list[Any]]


def run(
    comm: Communicator,
    folder: str,
    name: str,
    *,
    seed: int,
    replays: bool,
    steps: int = 8,
    lead_s: float = 0.0,
) -> Outcome:
    """The final model, and every worker's pushes by staleness; its own speed by `seed`, and the
    first one so far ahead of the others after the first half."""
    options = dict(RUNS[name])
    servers = options.pop("servers", servers_of(comm, apart=True))
    options["servers"] = min(servers, comm.size - 1)
    options["replay" if replays else "record"] = folder
    dtype = np.float32 if "gradient_bits" in options else np.float64
    learner = learner_of(comm, asynchronous(**options), MomentumSGD(lr=0.05), dtype)
    if not learner.serves:
        rank = learner.comm.rank
        random = np.random.default_rng([25, seed, rank])
        for step in range(steps):
            if random.random() < 0.5:
                time.sleep(random.random() * 2e-3)
            m = few_samples_of(rank, step)
            put_gradient(learner, step, m)
            learner.step(samples=m)
            if step == 3:
                learner.meet()
                time.sleep(lead_s if rank else 0)
    final = finished(comm, learner)
    table = learner.state.table
    seen = [] if table is None else [(worker.pushes, dict(worker.staleness)) for worker in table]
    return final.tobytes(), seen


def one_folder(comm: Communicator, tmp_path: Any) -> str:
    """Rank 0's, on all ranks."""
    return str(comm.allgather_object(str(tmp_path / "orders"))[0])


@every_run
def test_a_run_is_repeated(comm, tmp_path, name):
    """Whatever the speed of every worker is then; also one of MPI."""
    folder = one_folder(comm, tmp_path)
    outcome = run(comm, folder, name, seed=0, replays=False)
    everywhere = comm.allgather_object(outcome)  # servers have written their orders by now
    if comm.rank == 0:
        for seed in (1, 2):
            again = partial(run, folder=folder, name=name, seed=seed, replays=True)
            assert simulate(comm.size, again, timeout_s=20) == everywhere
    comm.barrier()
    if name == "async":  # where they came from
        assert run(comm, folder, name, seed=3, replays=True) == outcome


def test_another_order_is_another_run(tmp_path):
    """So that it is the order that repeats the run, and not luck."""
    play = partial(run, folder=str(tmp_path), name="async", seed=0)
    simulate(3, partial(play, replays=False))
    path = tmp_path / "order-of-server-0.i4"
    order, finals = np.fromfile(path, "<i4"), []
    for first in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4):  # three pushes, and they meet
        assert sorted(order[:8].tolist()) == sorted(first)
        order[:8] = first
        order.tofile(path)
        finals.append(simulate(3, partial(play, replays=True))[0])
    assert finals[0] != finals[1]
    assert finals[0][1] != finals[1][1]


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.parametrize(
    ("recorded", "replayed", "ranks", "message"),
    [
        ("async", "async", 2, r"workers=2, but here it is 1 \(on rank 1\)"),
        ("async", "pipeline", 3, r"pipeline=False, but here it is True \(on rank 2\)"),
        ("async, beside", "async, beside", 2, r"servers=3, but here it is 2 \(on ranks 0, 1\)"),
    ],
)
def test_another_run_is_refused(tmp_path, recorded, replayed, ranks, message):
    play = partial(run, folder=str(tmp_path), seed=0)
    simulate(3, partial(play, name=recorded, replays=False))
    with pytest.raises(UserError, match=rf"^replay='.*' is of {message}$"):
        simulate(ranks, partial(play, name=replayed, replays=True), timeout_s=5)


def test_a_server_that_cannot_record_is_not_in_the_way_of_others(tmp_path):
    name = "compensated, 2 servers"
    play = partial(run, folder=str(tmp_path), name=name, seed=0, replays=False)
    (tmp_path / "order-of-server-1.i4").touch()
    with pytest.raises(UserError, match=r"^record='.*' has a recording already \(on rank 3\)$"):
        simulate(4, play, timeout_s=5)
    assert os.listdir(tmp_path) == ["order-of-server-1.i4"]
    (tmp_path / "order-of-server-1.i4").unlink()
    simulate(4, play)


def test_a_problem_counts_for_more_than_the_order_that_cannot_be_written(
    on_ranks, tmp_path, monkeypatch
):
    def describe(order, requests):
        if requests is not None:  # at the end
            raise UserError("a full disk")

    monkeypatch.setattr(RecordedOrder, "_describe", describe)

    def body(comm, fails):
        folder = f"{one_folder(comm, tmp_path)}-{fails}"
        learner = learner_of(comm, asynchronous(record=folder), SGD(lr=0.1))
        try:
            if not learner.serves:
                put_gradient(learner, 0, 2)
                learner.step(samples=2)
                if fails and learner.comm.rank == 0:
                    learner.fail("label 12")
            learner.finish()
        except UserError as error:
            return str(error)
        return "none"

    assert set(on_ranks(partial(body, fails=True))) == {"label 12 (on rank 0)"}
    assert set(on_ranks(partial(body, fails=False))) - {"none"} == {"a full disk"}


def test_an_order_that_was_never_recorded(tmp_path):
    play = partial(run, folder=str(tmp_path), name="async", seed=0, replays=True)
    with pytest.raises(UserError, match=r"^replay='.*': no order of server 0"):
        simulate(2, play, timeout_s=5)


@pytest.mark.parametrize("name", ["async", "compensated, 2 servers"])
def test_a_shorter_run_ends_with_a_reason(tmp_path, name):
    """Those that wait for their turn must not keep each other waiting for ever."""
    play = partial(run, folder=str(tmp_path), name=name, seed=0)
    simulate(4, partial(play, replays=False, lead_s=0.5))  # or all might be just as far
    message = r"^replay: the recorded order has the worker on rank \d next, which waits for other w"
    with pytest.raises(UserError, match=message):  # at once
        simulate(4, partial(play, replays=True, steps=5), timeout_s=60)
