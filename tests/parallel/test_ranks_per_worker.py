"""Workers of several ranks: sums within a worker, and one rank that pushes and pulls for all."""

from __future__ import annotations

import copy
import json
import time
from functools import partial

import numpy as np
import pytest
from invariants import same_bits
from limits import patience
from served_training import (
    Serial,
    alike,
    asynchronous,
    few_samples_of,
    finished,
    gradient_at,
    put_gradient,
    starting_point,
)
from shared_workers import (
    MOMENTUM,
    PLAIN,
    RANKS,
    learner_of,
    same_within,
    train,
)

import parallel_sgd as psgd
from parallel_sgd import (
    SGD,
    Adam,
    Communicator,
    DataParallelSGD,
    Learner,
    MomentumSGD,
    simulate,
)
from parallel_sgd.algorithms.asynchronous_state import DataParallelASGDState
from parallel_sgd.command_line import read, train_on
from parallel_sgd.parameter_server import Client
from parallel_sgd.parameter_server.shared_client import SharedClient

MODES = {
    "async": {},
    "period": {"sync_steps": 3},
    "bounded": {"mode": "bounded", "staleness": 0},
    "sync": {"mode": "sync"},
    "deltas": {"currency": "deltas", "sync_steps": 2},
    "geo": {"mode": "geo", "sync_steps": 3},
    "compensation": {"delay_compensation": 0.4},
    "two servers": {"servers": 2},
}


def one_worker_is_data_parallel(comm, optimizer=MOMENTUM, told=True):
    """A worker of all ranks that train is synchronous SGD on these ranks, to the bit."""
    if comm.size == 1:
        return
    learner = learner_of(comm, comm.size - 1, optimizer)
    if not learner.serves:
        assert len(learner.group.workers) == 1
        twin = Learner(starting_point(), optimizer, DataParallelSGD(), learner.comm)
        rank = learner.comm.rank
        for step in range(8):
            samples = [few_samples_of(k, step) for k in range(learner.comm.size)]
            for trained in (learner, twin):
                if told:
                    trained.announce(samples[rank], sum(samples))
                put_gradient(trained, step, samples[rank])
                assert trained.step(samples=samples[rank]) == sum(samples)
            assert same_bits(learner.parameters.flat, twin.parameters.flat), f"step {step}"
        assert same_bits(finished(comm, learner), twin.parameters.flat)
    else:
        finished(comm, learner)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("optimizer", [MomentumSGD(lr=0.1), Adam(lr=0.05)], ids=["m", "Adam"])
def test_one_worker_is_data_parallel(on_ranks, optimizer, told):
    on_ranks(lambda comm: one_worker_is_data_parallel(comm, optimizer, told))


def workers_are_their_sums(comm):
    """Workers in rounds are workers of one rank with their ranks' data, whose sums are rounded in
    the same order: each worker's gradients first, then the workers'."""
    learner = learner_of(comm, 2, SGD(lr=0.1), mode="sync")
    if not learner.serves:
        serial, size = Serial(SGD(lr=0.1)), learner.comm.size
        for step in range(8):
            samples = [few_samples_of(k, step) for k in range(size)]
            rank = learner.comm.rank
            learner.announce(samples[rank], sum(samples))
            put_gradient(learner, step, samples[rank])
            assert learner.step(samples=samples[rank]) == sum(samples)
            own = [
                gradient_at(serial.x, k, step, m) if m else np.zeros_like(serial.x)
                for k, m in enumerate(samples)
            ]
            assert not any(same_bits(own[0], other) for other in own[1:] if other.any())
            pairs = [own[k] + own[k + 1] for k in range(0, size, 2)]
            serial.step(pairs[0] + sum(pairs[1:]), sum(samples))
            alike(learner.parameters.flat, serial.x, f"step {step}")
            same_within(learner)
        assert len(learner.group.workers) == size // 2
    alike(finished(comm, learner), serial.x) if not learner.serves else finished(comm, learner)


def test_workers_are_their_sums():
    simulate(RANKS, workers_are_their_sums)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_ranks_of_a_worker_have_one_model(mode, told):
    """With every mode; the number of pushes and samples is that of the workers."""

    def body(comm):
        learner = learner_of(comm, 2, **MODES[mode])
        models = train(learner, told=told)
        finished(comm, learner)
        if learner.serves:
            return None
        assert len({model.tobytes() for model in models}) > 2
        report = learner.report()["workers"]
        assert len(report) == len(learner.group.workers) == 2
        return sum(worker["samples"] for worker in report)

    ranks = RANKS + (mode == "two servers")
    counted = simulate(ranks, body)
    expected = sum(few_samples_of(k, step) for k in range(4) for step in range(8))
    assert counted[:4] == [expected] * 4


def test_a_pipeline_of_workers():
    """A push travels beside the next period, for all ranks of the worker."""

    def body(comm):
        learner = learner_of(comm, 2, pipeline=True, mode="sync")
        train(learner)
        return finished(comm, learner)

    models = simulate(RANKS, body)
    assert all(same_bits(models[0], model) for model in models)


def test_a_recorded_order_is_repeated(tmp_path):
    def body(comm, **order):
        learner = learner_of(comm, 2, **order)
        train(learner)
        return finished(comm, learner)

    recorded = simulate(RANKS, lambda comm: body(comm, record=str(tmp_path)))
    replayed = simulate(RANKS, lambda comm: body(comm, replay=str(tmp_path)))
    assert same_bits(recorded[0], replayed[0])


def test_one_rank_a_worker_changes_nothing():
    """The same client, groups and bits as without the option."""

    def body(comm, **options):
        algorithm = asynchronous(mode="sync", servers=1, gradient_bits=4, **options)
        learner = Learner(starting_point(np.float32), SGD(lr=0.1), algorithm, comm)
        if not learner.serves:
            assert type(learner.state.client) is Client
            assert learner.group.within is learner.state.local_sum is None
        train(learner)
        return finished(comm, learner)

    plain, given = simulate(3, body), simulate(3, lambda comm: body(comm, ranks_per_worker=1))
    assert same_bits(plain[0], given[0])


@pytest.mark.parametrize("options", [{}, {"currency": "deltas"}, {"gradient_bits": 1}], ids=str)
def test_bytes_between_workers_and_servers(options):
    """Four ranks that train send and receive a half, and a quarter. The ranks of a worker sum in 32
    bits, and the first rank gives the model to the others."""

    def body(comm, ranks_per_worker):
        learner = learner_of(comm, ranks_per_worker, dtype=np.float32, **options)
        for _ in range(0 if learner.serves else 6):
            learner.gradient.flat[:] = 1 + learner.comm.rank
            learner.announce(1, 4)
            learner.step(samples=1)
        finished(comm, learner)
        sent = sum(comm.allgather_object(0 if learner.serves else learner.bytes_sent))
        if learner.serves:
            return None
        workers = learner.report()["workers"]
        within = sum(worker["bytes_within"] for worker in workers)
        between = sum(worker["bytes_sent"] + worker["bytes_received"] for worker in workers)
        assert sent == between + within
        # Of short vectors each rank sends its own to all others of the worker.
        others = ranks_per_worker - 1
        vectors = ranks_per_worker * others + others
        assert within == (4 // ranks_per_worker) * 6 * vectors * 128 * 4
        return between

    plain, halves, quarter = (
        simulate(RANKS, partial(body, ranks_per_worker=ranks))[0] for ranks in (1, 2, 4)
    )
    if "gradient_bits" in options:  # messages of an entropy code differ in length
        assert plain / halves == pytest.approx(2, rel=0.05)
        assert plain / quarter == pytest.approx(4, rel=0.05)
    else:
        assert plain == 2 * halves == 4 * quarter == 4 * 6 * 2 * 128 * 4


def few_bits_lose_nothing(comm):
    """Applied sums and residuals are all gradients: the sum of a worker is encoded once."""
    learner = learner_of(
        comm, 2, SGD(lr_per_sample=1.0), np.float32, gradient_bits=2, block_size=16
    )
    inputs = residual = np.zeros(128)
    for step in range(0 if learner.serves else 7):
        random = np.random.default_rng([step, comm.rank])
        gradient = random.standard_normal(128).astype(np.float32)
        inputs = inputs + gradient
        learner.gradient.flat[:] = gradient
        learner.announce(1, 4)
        learner.step(samples=1)
    final = finished(comm, learner)
    if not learner.serves:
        residual = learner.state.residual.astype(float)
        assert residual.any() == learner.state.client.sends
    lost, total = (np.sum(comm.allgather_object(own), axis=0) for own in (residual, inputs))
    applied = starting_point(np.float32).flat - final.astype(float)
    np.testing.assert_allclose(applied + lost, total, atol=1e-4)


def test_few_bits_lose_nothing():
    simulate(RANKS, few_bits_lose_nothing)


def warm_start_then_workers(comm):
    learner = learner_of(comm, 2, MomentumSGD(lr=0.05), mode="sync", distributed_after=6)
    for step in range(0 if learner.serves else 6):
        warm = learner.samples < 6
        own, total = (3, 3) if warm else (1 + learner.comm.rank, 10)
        learner.announce(own, total)
        worker = 0 if warm else learner.comm.rank
        learner.gradient.flat[:] = gradient_at(learner.parameters.flat, worker, step, own)
        learner.step(samples=own)
        same_within(learner)
    return finished(comm, learner)


def test_a_warm_start():
    models = simulate(RANKS, warm_start_then_workers)
    assert all(same_bits(models[0], model) for model in models)


def pushes_own_gradient(right, state, vector, samples):
    """The other ranks' gradients are left out of the sum."""
    return samples if state.local_sum is None else state.group.sum_within(samples, 1)


def counts_twice(right, state, vector, samples):
    """The sum's samples are twice as many."""
    return 2 * right(state, vector, samples)


def drops_answers(right, client, asks):
    """The other ranks of a worker do not take the pulled model."""
    before = [None if ask.into is None else ask.into.copy() for ask in asks]
    answers = right(client, asks)
    for ask, old in zip(asks, before, strict=True):
        if old is not None:
            ask.into[...] = old
    return answers


MUTATIONS = {
    "no sum": (DataParallelASGDState, "sum_within", pushes_own_gradient),
    "samples": (DataParallelASGDState, "sum_within", counts_twice),
    "no broadcast": (SharedClient, "_await_answers", drops_answers),
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("check", [one_worker_is_data_parallel, workers_are_their_sums])
def test_mutations(name, check, monkeypatch):
    """The identities fail without a part of what makes a worker of several ranks."""
    kind, method, wrong = MUTATIONS[name]
    ranks = 3 if check is one_worker_is_data_parallel else RANKS
    simulate(ranks, check)
    right = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda *arguments: wrong(right, *arguments))
    with pytest.raises(AssertionError):
        simulate(ranks, check)


@pytest.mark.parametrize("options", [{}, {"currency": "deltas"}, {"gradient_bits": 4}], ids=str)
def test_resuming(tmp_path, options):
    """Saved in the middle of a period, and continued to the bit."""

    def body(comm, at):
        learner = learner_of(
            comm, 2, MomentumSGD(lr=0.05), np.float32, mode="sync", sync_steps=3, **options
        )
        if at is None and not learner.serves:
            psgd.load_checkpoint(learner, tmp_path)
        steps = range(5 if at is None else 0, 10 if at != 5 else 5)
        for step in () if learner.serves else steps:
            learner.announce(1 + learner.comm.rank, 10)
            put_gradient(learner, step, 1 + learner.comm.rank)
            learner.step(samples=1 + learner.comm.rank)
        if at == 5 and not learner.serves:
            psgd.Checkpoints(tmp_path).save(learner, background=False)
        return finished(comm, learner)

    whole = simulate(RANKS, lambda comm: body(comm, 10))
    simulate(RANKS, lambda comm: body(comm, 5))
    resumed = simulate(RANKS, lambda comm: body(comm, None))
    assert same_bits(whole[0], resumed[0])


def test_the_ranks_of_hosts(monkeypatch):
    """Hosts may have different numbers of ranks."""
    hosts = ["b", "a", "b", "b", "a"]
    monkeypatch.setattr(Communicator, "hosts", property(lambda self: hosts))

    def body(comm):
        learner = learner_of(comm, "host", mode="sync")
        train(learner)
        group = learner.group
        if not learner.serves:
            assert group.workers == (0, 1)
            assert group.within.size == (1 if comm.rank == 1 else 3)
            assert group.worker == (comm.rank == 1)
        return finished(comm, learner)

    models = simulate(RANKS, body)
    assert all(same_bits(models[0], model) for model in models)


@pytest.mark.parametrize(
    ("mode", "ranks"), [("sync", "by 4 ranks"), ("async", "one of 4 ranks of asynchronous workers")]
)
def test_performance_lines_count_ranks(mode, ranks, capsys):
    def body(comm):
        algorithm = asynchronous(ranks_per_worker=2, servers=1, mode=mode)
        learner = Learner(starting_point(), PLAIN, algorithm, comm, sync_perf_stats=2)
        train(learner)
        finished(comm, learner)

    simulate(RANKS, body)
    assert ranks in capsys.readouterr().out


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("options", [{}, {"currency": "deltas", "sync_steps": 2}], ids=str)
def test_waiting_for_slower_ranks_of_the_worker_is_no_computing(options, told):
    steps, slow_s = 6, 0.1 * patience()

    def body(comm):
        learner = learner_of(comm, 2, **options)
        for _ in range(0 if learner.serves else steps):
            learner.gradient.flat[:] = 1
            if told:
                learner.announce(1, 4)
            time.sleep(slow_s * (comm.rank % 2))  # the first rank of each worker waits
            learner.step(samples=1)
        learner.finish()
        return None if learner.serves else learner.report()["workers"]

    for worker in simulate(RANKS, body)[0]:
        seconds = worker["seconds"]
        assert seconds["wait"] > steps * slow_s / 2 > seconds["compute"]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_last_row_has_the_bytes_of_all_ranks(mode):
    def body(comm):
        training, test = psgd.data.digits()
        model = psgd.models.MLP([64, 10], seed=0)
        algorithm = asynchronous(ranks_per_worker=2, servers=1, mode=mode)
        with Learner(model.parameters, PLAIN, algorithm, comm) as learner:
            rows = psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=training,
                minibatch_size=256,
                epochs=1,
                validation=psgd.CrossValidation(data=test, name="test"),
            ).run()
            own = 0 if learner.serves else learner.bytes_sent
        return sum(comm.allgather_object(own)), rows and rows[-1].bytes_sent

    sent, in_row = simulate(RANKS, body)[0]
    assert sent == in_row > 0


def test_what_train_says_of_workers(tmp_path, capsys):
    """At the start, at the end and in the run's folder; and the bytes, each under its name."""
    flags = ["--algorithm", "async", "--servers", "1", "--sync-steps", "1", "--epochs", "1"]
    flags += ["--ranks-per-worker", "2", "--no-plot", "--output", str(tmp_path / "run")]
    options, algorithm, optimizer = read(flags)
    simulate(RANKS, lambda comm: train_on(copy.copy(options), algorithm, optimizer, comm))
    lines = capsys.readouterr().out.splitlines()
    said = "2 workers with 4 ranks in all and 1 server"
    assert f"{said}, 1438 samples" in lines
    assert any(line.startswith(f"{said}, DataParallelASGD (async)") for line in lines)
    facts = json.loads((tmp_path / "run/options.json").read_text())
    assert [facts[name] for name in ("ranks", "trainers", "workers")] == [5, 4, 2]
    assert f"# A run on {said}, of" in (tmp_path / "run/config.toml").read_text()
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    workers = row["details"]["workers"]
    between = sum(worker["bytes_sent"] + worker["bytes_received"] for worker in workers)
    within = sum(worker["bytes_within"] for worker in workers)
    assert f"bytes between workers and servers {between:,d}" in lines
    assert f"bytes within the workers {within:,d}" in lines
    assert row["bytes_sent"] == between + within > between > 0
