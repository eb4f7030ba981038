"""The warm start of asynchronous workers: all train on the same, and servers begin with it."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from cases import few_ranks_but, gradient_of, shared
from few_weights import learner_of as few_weights_of
from few_weights import numbered, put
from invariants import ROUNDING, same_bits, same_on_all_ranks
from served_training import (
    N,
    Serial,
    alike,
    asynchronous,
    beside_and_apart,
    few_samples_of,
    finished,
    gradient_at,
    learner_of,
    servers_of,
    starting_point,
)

from parallel_sgd import (
    SGD,
    Adam,
    Checkpoints,
    DataParallelSGD,
    Learner,
    ModelAveragingSGD,
    MomentumSGD,
    load_checkpoint,
    simulate,
)
from parallel_sgd.data import RankSource, Source
from parallel_sgd.errors import SharedError, UserError
from parallel_sgd.schedules import Linear
from parallel_sgd.training import capture, checkpoints_in

WHOLE = (4, 0, 3, 5, 2, 6)  #: samples of the minibatches of the warm start
END = 18  #: of it; the last of them is taken whole
STEPS = 11
EVERYBODYS = 9  #: whose data all have in the warm start


def step_of(learner, step, rank=None):
    """A step with the whole minibatch, or later with the part of this worker."""
    x, workers = learner.parameters.flat, learner.comm.size
    if not learner.distributed:
        worker, m = EVERYBODYS, WHOLE[step]
        total = m
    else:
        worker = learner.comm.rank
        m, total = (
            few_samples_of(worker, step),
            sum(few_samples_of(k, step) for k in range(workers)),
        )
    learner.announce(m, total)
    learner.gradient.flat[:] = gradient_at(x, worker, step, m) if m else np.nan
    assert learner.step(samples=m) == total


def stands_elsewhere(learner):
    """What machines that round differently may come to: all but the first worker."""
    for array in (learner.parameters.flat, *learner.local_step.state.buffers.values()):
        array *= 1 + 1e-3 * learner.comm.rank


EVERY_WAY = {
    "async": {},
    "bounded": {"mode": "bounded", "staleness": 0},
    "sync": {"mode": "sync"},
    "geo": {"mode": "geo", "sync_steps": 2},
    "1 bit, pipeline": {"gradient_bits": 1, "block_size": 16, "pipeline": True},
    "deltas, pipeline": {"currency": "deltas", "pipeline": True, "ramp_minibatches": 3},
    "delay compensation": {"delay_compensation": 0.5, "pipeline": True},
}


@beside_and_apart
@pytest.mark.parametrize("name", few_ranks_but(["1 bit, pipeline"], EVERY_WAY))
def test_as_long_as_the_whole_run_it_is_serial(comm, apart, name):
    """Every bit, after every step and at the end, on servers too."""
    optimizer = MomentumSGD(lr=Linear({0: 0.2, 30: 0.05}))
    algorithm = asynchronous(
        servers=servers_of(comm, apart), distributed_after=99, **EVERY_WAY[name]
    )
    learner = learner_of(comm, algorithm, optimizer, np.float32)
    serial = Serial(optimizer, np.float32)
    for step, m in enumerate(WHOLE):
        serial.step(gradient_at(serial.x, EVERYBODYS, step, m), m)
        if not learner.serves:
            step_of(learner, step)
            assert same_bits(learner.parameters.flat, serial.x)
            assert same_bits(learner.runner.common_model(), serial.x)
            assert learner.bytes_sent == 0
    assert same_bits(finished(comm, learner), serial.x)
    if not learner.serves:
        assert learner.samples == learner.state.client.samples == sum(WHOLE)


@beside_and_apart
@pytest.mark.parametrize(
    "optimizer",
    [SGD(lr=Linear({0: 0.3, 40: 0.05})), MomentumSGD(lr=0.1), Adam(lr=0.05)],
    ids=["scheduled", "momentum", "Adam"],
)
def test_rounds_go_on_from_the_first_worker(comm, apart, optimizer):
    """As `DataParallelSGD` after its own, in every bit of the model and the optimizer's vectors."""
    algorithm = asynchronous(mode="sync", servers=servers_of(comm, apart), distributed_after=END)
    learner = learner_of(comm, algorithm, optimizer)
    if not learner.serves:
        twin = Learner(
            starting_point(), optimizer, DataParallelSGD(distributed_after=END), learner.comm
        )
        for step in range(STEPS):
            for trained in (learner, twin):
                if step == len(WHOLE) - 1:
                    stands_elsewhere(trained)
                step_of(trained, step)
            assert same_bits(learner.parameters.flat, twin.parameters.flat), step
            assert learner.distributed == (step >= len(WHOLE) - 1)
        capture(learner)
        if learner.comm.rank == 0:
            buffers, held = twin.local_step.state.buffers, learner.state.served
            for name, vector in zip(sorted(buffers), held.vectors[1:], strict=True):
                assert same_bits(vector, buffers[name])
            steps = twin.local_step.state.steps
            assert held.counters[:, 1:3].tolist() == [[steps, twin.samples]] * len(held.counters)
    final = finished(comm, learner)
    assert learner.serves or same_bits(final, twin.parameters.flat)


@beside_and_apart
def test_model_updates_go_on_from_the_first_worker(comm, apart):
    """As model averaging does, each worker with the first one's momentum."""
    optimizer, servers = MomentumSGD(lr=0.1), servers_of(comm, apart)
    algorithm = asynchronous(
        mode="sync", currency="deltas", sync_steps=2, servers=servers, distributed_after=END
    )
    learner = learner_of(comm, algorithm, optimizer)
    if not learner.serves:
        averaging = ModelAveragingSGD(sync_steps=2, distributed_after=END)
        twin = Learner(starting_point(), optimizer, averaging, learner.comm)
        for step in range(STEPS):
            for trained in (learner, twin):
                if step == len(WHOLE) - 1:
                    stands_elsewhere(trained)
                step_of(trained, step)
            alike(learner.runner.common_model(), twin.runner.common_model(), step)
        twin.finish()
    final = finished(comm, learner)
    assert learner.serves or alike(final, twin.parameters.flat) is None


ONE_WORKER = [{}, {"delay_compensation": 0.5}, {"mode": "bounded"}, {"currency": "deltas"}]


@pytest.mark.parametrize("options", ONE_WORKER, ids=str)
def test_one_worker_goes_on_as_serial(comm, options):
    """Servers have its optimizer's momenta and steps; a model of before would be compensated."""
    optimizer = Adam(lr=0.05)
    algorithm = asynchronous(servers=comm.size - 1, distributed_after=END, **options)
    learner, serial = learner_of(comm, algorithm, optimizer), Serial(optimizer)
    for step in [] if learner.serves else range(STEPS):
        worker, m = EVERYBODYS, WHOLE[step] if step < len(WHOLE) else 0
        if learner.distributed:
            worker, m = 0, few_samples_of(0, step)
        serial.step(gradient_at(serial.x, worker, step, m), m)
        step_of(learner, step)
        alike(learner.parameters.flat, serial.x, step)
        assert options.get("currency") or same_bits(learner.parameters.flat, serial.x)
    finished(comm, learner)


RATE = 0.125


@beside_and_apart
def test_nothing_that_few_bits_lose_is_lost(comm, apart):
    """Every push after it counts once, and begins with the model of its end on all workers."""
    algorithm = asynchronous(
        servers=servers_of(comm, apart), gradient_bits=1, block_size=16, distributed_after=END
    )
    learner = learner_of(comm, algorithm, SGD(lr_per_sample=RATE), np.float32)
    start, inputs, residual = np.zeros(N), np.zeros(N), np.zeros(N)
    if not learner.serves:
        for step in range(len(WHOLE)):
            step_of(learner, step)
        start[:] = learner.parameters.flat
        same_on_all_ranks(learner.comm, learner.parameters.flat)
        for step in range(5 + learner.comm.rank):
            learner.gradient.flat[:] = gradient_of(learner.comm.rank, step, N)
            inputs += learner.gradient.flat
            learner.step(samples=1)
    final = finished(comm, learner)
    if not learner.serves:
        residual += learner.state.residual
        assert residual.any()
    first = comm.allgather_object(start)[0]
    owed = np.sum(comm.allgather_object(inputs - residual), axis=0)
    largest = max(1.0, np.abs(owed).max(), np.abs(final).max())
    assert np.abs((first - final) / RATE - owed).max() <= 1000 * ROUNDING * largest


@pytest.mark.few_ranks
@beside_and_apart
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({"mode": "sync"}, Adam(lr=0.05)),
        ({"mode": "sync", "currency": "deltas", "sync_steps": 3}, MomentumSGD(lr=0.1)),
        ({"pipeline": True}, Adam(lr=0.05)),
    ],
    ids=["sync", "sync, deltas", "async"],
)
def test_checkpoints_before_and_after_its_end(comm, apart, options, optimizer, tmp_path):
    """Every bit of the rest; with workers at their own paces of the warm start."""
    algorithm = asynchronous(servers=servers_of(comm, apart), distributed_after=END, **options)
    learner = learner_of(comm, algorithm, optimizer)
    models, after = [], [3, len(WHOLE), len(WHOLE) + 2]
    checkpoints = Checkpoints(shared(comm, tmp_path), keep=9)
    for step in range(STEPS):
        if step in after:
            checkpoints.save(learner)
        if not learner.serves:
            step_of(learner, step)
            models.append(learner.parameters.flat.copy())
    checkpoints.close()
    final, repeats = finished(comm, learner), algorithm.mode == "sync"
    paths = checkpoints_in(checkpoints.folder)
    assert len(paths) == len(after)
    for path, first in zip(paths, after, strict=True):
        elsewhere = asynchronous(
            servers=algorithm.servers, slice_parameters=False, distributed_after=END, **options
        )
        resumed = learner_of(comm, elsewhere, optimizer)
        if not resumed.serves and first != 3:
            step_of(resumed, 0)  # it stands in a warm start
        load_checkpoint(resumed, path)
        for step in [] if resumed.serves else range(first, STEPS):
            step_of(resumed, step)
            if repeats or step < len(WHOLE):
                assert same_bits(resumed.parameters.flat, models[step]), (first, step)
        assert same_bits(finished(comm, resumed), final) or not repeats
        assert resumed.samples == learner.samples


def fails(learner):
    learner.fail("label 12")


def has_no_finite_gradient(learner):
    learner.gradient.flat[3] = np.inf
    learner.step(samples=4)


def has_other_samples(learner):
    learner.gradient.flat[:] = 0
    learner.step(samples=5)


def finishes(learner):
    learner.finish()


def meets(learner):
    learner.meet()


IN_STEP = r"wait for each other: .*waits? in step\(\) before distributed_after for all"

WRONG = {
    fails: r"^label 12 \(on rank {}\)$",
    has_no_finite_gradient: r"^the gradient is not finite: its largest .* \(on rank {}\)$",
    has_other_samples: "^samples of a minibatch before distributed_after must be the same on all "
    r"ranks, but differs: ranks? [\d, ]+: 4; rank {}: 5$",
    finishes: IN_STEP,
    meets: IN_STEP,
}


@pytest.mark.few_ranks
@beside_and_apart
@pytest.mark.parametrize("does", WRONG)
def test_a_worker_that_cannot_go_on_ends_all(comm, apart, does):
    algorithm = asynchronous(servers=servers_of(comm, apart), distributed_after=END)
    learner, begin = learner_of(comm, algorithm, SGD(lr=0.1)), time.monotonic()
    workers = comm.size - algorithm.servers
    if workers == 1:
        learner.finish()
        return

    def train():
        if learner.serves:
            learner.finish()
        for step in range(4):
            learner.gradient.flat[:] = 0
            if step == 1 and comm.rank == workers - 1:
                does(learner)
            learner.step(samples=4)

    with pytest.raises(SharedError) as caught:
        train()
    assert re.search(WRONG[does].format(workers - 1), str(caught.value)), caught.value
    assert time.monotonic() - begin < 10


def test_servers_hear_of_workers_in_every_step():
    """Each of them: none takes a worker for silent while it trains without it."""

    def body(comm):
        algorithm = asynchronous(servers=2, distributed_after=99)
        learner = learner_of(comm, algorithm, SGD(lr=0.1))
        for step in [] if learner.serves else range(len(WHOLE)):
            time.sleep(0.3)
            step_of(learner, step)
        return finished(comm, learner)[0]

    assert len(set(simulate(4, body, timeout_s=1.0))) == 1


@beside_and_apart
def test_a_source_gives_whole_minibatches_until_its_end(on_ranks, apart):
    def body(comm):
        algorithm = asynchronous(servers=servers_of(comm, apart), distributed_after=20)
        learner = few_weights_of(comm, algorithm)
        labels = []
        for x, y in Source(*numbered(30), 8, epochs=2).minibatches(learner):
            learner.step(put(learner, (x, y)))
            labels.append(y.tolist())
        learner.finish()
        assert learner.serves or learner.samples == 60
        return labels

    given = [labels for labels in on_ranks(body) if labels]
    for minibatch, parts in enumerate(zip(*given, strict=True)):
        if minibatch < 3:
            assert all(part == parts[0] and len(part) == 8 for part in parts)
        else:
            together = [label for part in parts for label in part]
            assert len(together) == len(set(together)) == (6 if minibatch in (3, 7) else 8)


@pytest.mark.filterwarnings("ignore:servers=0")
def test_own_data_are_refused(comm):
    learner = learner_of(comm, asynchronous(servers=0, distributed_after=9), SGD(lr=0.1))
    with pytest.raises(
        UserError, match=r"^distributed_after must be 0 if each rank has separate data"
    ):
        next(iter(RankSource(*numbered(9), comm.size).minibatches(learner)))
