"""Workers that would wait for each other for ever are told at once, in spite of heartbeats."""

from __future__ import annotations

import re
import time

import pytest
from served_training import asynchronous, beside_and_apart, learner_of, put_gradient, servers_of

from parallel_sgd import SGD, Checkpoints, UserError, simulate
from parallel_sgd.errors import SharedError
from parallel_sgd.parameter_server import Client, Server

SECONDS = 15  #: after which a wait counts as endless; the rest of the job then ends, too


@pytest.fixture(autouse=True)
def no_endless_wait(monkeypatch):
    """Where the package waits for ever, its servers end after a while, and with them the test."""
    end, look = time.monotonic() + SECONDS, Server._check_workers

    def looks_at_the_clock(server):
        if time.monotonic() > end:
            raise UserError("workers have waited for each other")
        look(server)

    monkeypatch.setattr(Server, "_check_workers", looks_at_the_clock)


def steps(learner, count):
    for step in range(count):
        put_gradient(learner, step, 2)
        learner.step(samples=2)


def three_and_finish(learner):
    steps(learner, 3)
    learner.finish()


def four_and_finish(learner):
    steps(learner, 4)
    learner.finish()


def meets(learner):
    steps(learner, 1)
    learner.meet()


def saves(learner):
    steps(learner, 1)
    Checkpoints("nowhere").save(learner)


def steps_on(learner):
    steps(learner, 2)


SYNC = {"mode": "sync"}
MEETS = r"rank 0 waits in meet\(\) or Checkpoints\.save\(\) for all"
LEFT = r"ranks? [\d, ]+ waits? in finish\(\) for all"

#: Options, what the first worker does, what the others do, and what is said of both.
CASES = {
    "a period that has not ended": (
        {**SYNC, "sync_steps": 2},
        three_and_finish,
        four_and_finish,
        r"rank 0 waits for the answer to its push 2 \(mode='sync'\); "
        r"ranks? [\d, ]+ waits? in step\(\) for the samples of all",
    ),
    "one more step, in the background": (
        {**SYNC, "sync_steps": 2, "pipeline": True},
        four_and_finish,
        three_and_finish,
        r"rank 0 waits in step\(\) for .*; ranks? .* for the answer to its push 2 \(mode='sync'\)",
    ),
    "one meets, others step": (
        SYNC,
        meets,
        steps_on,
        MEETS + r"; ranks? [\d, ]+ waits? in step\(\) for the samples of all",
    ),
    "one meets, others finish": ({}, meets, four_and_finish, MEETS + "; " + LEFT),
    "one meets, others finish, bounded": (
        {"mode": "bounded", "staleness": 1},
        meets,
        four_and_finish,
        MEETS + "; " + LEFT,
    ),
    "one saves, others finish, sync": (SYNC, saves, four_and_finish, MEETS + ".*"),
}


def how_it_ends(comm, learner, what):
    """What is said on this rank, and after how many seconds."""
    begin = time.monotonic()
    with pytest.raises(SharedError) as caught:
        learner.finish() if learner.serves else what(learner)
    return str(caught.value), time.monotonic() - begin


@beside_and_apart
@pytest.mark.parametrize("name", CASES)
def test_workers_that_wait_for_each_other_are_told(comm, apart, name):
    options, first, others, said = CASES[name]
    algorithm = asynchronous(servers=servers_of(comm, apart), **options)
    learner = learner_of(comm, algorithm, SGD(lr=0.1))
    if comm.size - algorithm.servers * apart == 1:  # there is nobody to wait for
        learner.finish()
        return
    end = how_it_ends(comm, learner, others if comm.rank else first)
    texts, seconds = zip(*comm.allgather_object(end), strict=True)
    assert max(seconds) < SECONDS / 2
    start = "^deadlock: workers wait for each other: "
    for text in texts:
        assert re.search(rf"{start}{said}; all workers must take the same", text), texts


@beside_and_apart
def test_no_bound_waits_for_a_worker_that_meets_the_others(comm, apart):
    """It pushes no more until they come: that they are far ahead of it is no reason to wait."""
    algorithm = asynchronous(servers=servers_of(comm, apart), mode="bounded", staleness=1)
    learner = learner_of(comm, algorithm, SGD(lr=0.1))
    count = 2 if comm.rank == 0 else 7 + comm.rank
    if not learner.serves:
        steps(learner, count)
        learner.meet()
        steps(learner, 1)
    learner.finish()
    if not learner.serves:
        pushes = [worker.pushes for worker in learner.state.table]
        assert pushes[learner.comm.rank] == count + 1
        assert pushes[0] == 3


@beside_and_apart
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_that_leaves_without_finish_is_found(apart, mode):
    """By the servers: who waits for one that is there does not look after other ranks itself."""

    def body(comm):
        algorithm = asynchronous(servers=servers_of(comm, apart), mode=mode)
        learner = learner_of(comm, algorithm, SGD(lr=0.1))
        if learner.serves:
            learner.finish()
        elif comm.rank == 1:
            steps(learner, 1)
        else:
            three_and_finish(learner)

    begin = time.monotonic()
    with pytest.raises(UserError, match=r"rank 1( has ended|, which has finished)"):
        simulate(4, body, timeout_s=60)
    assert time.monotonic() - begin < SECONDS / 2


def test_servers_end_with_their_workers(comm):
    """What the background asks after the last answer would never be answered."""
    learner = learner_of(comm, asynchronous(), SGD(lr=0.1))
    if not learner.serves:
        steps(learner, 1)
        client, x = learner.state.client, learner.parameters.flat
        late = []

        def leave_and_ask(client=client, x=x):
            table = client.leave(x)
            with pytest.raises(UserError, match=r"^the servers have ended with learner\.finish"):
                client.ask_all(13)
            late.append(table)

        Client.in_order(client, leave_and_ask)
        assert late
        learner.state.finished = True
        client.close()
        learner.state.connection.end()
    learner.finish()
