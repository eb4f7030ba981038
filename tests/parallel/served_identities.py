"""Identity 9 of parameter servers, as functions that every rank calls: see `invariants`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from cases import gradient_of
from invariants import ROUNDING, same_bits, same_on_all_ranks
from served_training import (
    ByHand,
    N,
    Serial,
    alike,
    asynchronous,
    few_samples_of,
    finished,
    gradient_at,
    learner_of,
    put_gradient,
    servers_of,
    starting_point,
    turns,
)

from parallel_sgd import SGD, Communicator, DataParallelSGD, Learner, ModelAveragingSGD, Optimizer

Array = np.ndarray


def one_worker_is_serial(
    comm: Communicator, optimizer: Optimizer, period: int = 1, steps: int = 8, **options: Any
) -> None:
    """However many servers: in every bit where gradients are pushed, else to rounding."""
    servers = comm.size - 1
    algorithm = asynchronous(servers=servers, sync_steps=period, **options)
    learner, serial = learner_of(comm, algorithm, optimizer), Serial(optimizer)
    if not learner.serves:
        summed, count = np.zeros(N), 0
        for step in range(steps):
            m = few_samples_of(0, step)
            put_gradient(learner, step, m)
            if algorithm.currency == "deltas":
                serial.step(gradient_at(serial.x, 0, step, m), m)
            else:
                summed += gradient_at(serial.x, 0, step, m)
                count += m
            assert learner.step(samples=m) == m
            if algorithm.currency == "deltas":
                alike(learner.parameters.flat, serial.x, step)
                continue
            if learner.state.gathered_samples == 0 or step == steps - 1:
                serial.step(summed, count)
                summed[:], count = 0, 0
            if learner.state.gathered_samples == 0:
                assert same_bits(learner.parameters.flat, serial.x), f"step {step}"
    final = finished(comm, learner)
    if not learner.serves and algorithm.currency == "deltas":
        alike(final, serial.x)
    elif not learner.serves:
        assert same_bits(final, serial.x)
        assert learner.state.client.samples == serial.local_step.samples == learner.samples


def taking_turns_is_serial(
    comm: Communicator, apart: bool, optimizer: Optimizer, rounds: int = 4
) -> None:
    """Workers that pull just before they compute: serial SGD on their data in turn, every bit."""
    algorithm = asynchronous(servers=servers_of(comm, apart))
    learner, serial = learner_of(comm, algorithm, optimizer), Serial(optimizer)
    if not learner.serves:
        client, x = learner.state.client, learner.parameters.flat
        for step, worker in turns(learner, rounds):
            m = 1 + (worker + step) % 3
            if worker == learner.comm.rank:
                client.pull(out=x)
                assert same_bits(x, serial.x), "not the newest model"
                put_gradient(learner, step, m)
                client.push(learner.gradient.flat, None, m, 1.0, out=x)
            serial.step(gradient_at(serial.x, worker, step, m), m)
            if worker == learner.comm.rank:
                assert same_bits(x, serial.x), "the push has not stepped"
    final = finished(comm, learner)
    if not learner.serves:
        assert same_bits(final, serial.x)
        table, workers = learner.state.table, learner.comm.size
        assert [dict(worker.staleness) for worker in table] == [{0: rounds}] * workers
        assert client.versions == [rounds * workers] * client.servers


def follows_the_equations(
    comm: Communicator, apart: bool, lr: Any = 0.2, rounds: int = 6, **options: Any
) -> None:
    """Steps of workers in turn, each on the model of its last push: as `ByHand`, and as stale."""
    algorithm = asynchronous(servers=servers_of(comm, apart), **options)
    learner = learner_of(comm, algorithm, SGD(lr=lr))
    by_hand = ByHand(algorithm, lr, learner.comm.size)
    if not learner.serves:
        learner.state.client  # a server beside this worker begins  # noqa: B018
        for step, worker in turns(learner, rounds):
            m = 1 + (worker + step) % 3
            by_hand.step(worker, gradient_at(by_hand.own[worker], worker, step, m), m)
            if worker == learner.comm.rank:
                put_gradient(learner, step, m)
                learner.step(samples=m)
                if learner.state.gathered_samples == 0 or algorithm.currency == "deltas":
                    alike(learner.parameters.flat, by_hand.own[worker], (step, worker))
    final = finished(comm, learner)
    if not learner.serves:
        alike(final, by_hand.x)
        staleness = [dict(worker.staleness) for worker in learner.state.table]
        assert staleness == by_hand.staleness
        client = learner.state.client
        assert client.versions == [by_hand.version] * client.servers


def every_push_counts(comm: Communicator, apart: bool, **options: Any) -> None:
    """None is lost and none doubled, in whatever order they come: the sum of all, exactly."""
    algorithm = asynchronous(servers=servers_of(comm, apart), **options)
    learner = learner_of(comm, algorithm, SGD(lr=0.5))
    workers = comm.size - algorithm.servers
    pushes = [4 + 3 * k for k in range(workers)]

    def pushed(worker: int, step: int) -> tuple[Array, int]:
        random = np.random.default_rng([22, worker, step])
        return random.integers(-64, 64, N).astype(float), int(random.choice([1, 2, 4]))

    if not learner.serves:
        rank = learner.comm.rank
        random = np.random.default_rng([23, rank])
        for step in range(pushes[rank]):
            time.sleep(random.random() * 2e-3)
            learner.gradient.flat[:], m = pushed(rank, step)
            learner.step(samples=m)
    final = finished(comm, learner)
    expected, samples = starting_point().flat.copy(), [0] * workers
    for worker in range(workers):
        for step in range(pushes[worker]):
            gradient, m = pushed(worker, step)
            expected -= 0.5 * gradient / m
            samples[worker] += m
    assert same_bits(final, expected)
    if learner.serves:
        return
    table, client = learner.state.table, learner.state.client
    assert client.versions == [sum(pushes)] * client.servers
    assert client.samples == sum(samples)
    assert [worker.pushes for worker in table] == pushes
    assert [worker.samples for worker in table] == samples
    assert [worker.staleness.total() for worker in table] == pushes


def synchronous_is_data_parallel(
    comm: Communicator, apart: bool, optimizer: Optimizer, told: bool, steps: int = 8
) -> None:
    """Every bit of the model after every step, with uneven samples and ranks that have none."""
    algorithm = asynchronous(mode="sync", servers=servers_of(comm, apart))
    learner = learner_of(comm, algorithm, optimizer)
    if not learner.serves:
        own, rank = learner.comm, learner.comm.rank
        twin = Learner(starting_point(), optimizer, DataParallelSGD(), own)
        for step in range(steps):
            samples = [few_samples_of(k, step) for k in range(own.size)]
            if told:
                learner.announce(samples[rank], sum(samples))
            for trained in (learner, twin):
                put_gradient(trained, step, samples[rank])
                assert trained.step(samples=samples[rank]) == sum(samples)
            assert same_bits(learner.parameters.flat, twin.parameters.flat), f"step {step}"
            assert learner.samples == twin.samples
        assert same_bits(finished(comm, learner), twin.parameters.flat)
        assert all(set(worker.staleness) <= {0} for worker in learner.state.table)
    else:
        finished(comm, learner)


def synchronous_deltas_are_model_averaging(
    comm: Communicator, apart: bool, optimizer: Optimizer, steps: int = 11, **period: Any
) -> None:
    """To rounding; with uneven samples, dry ranks, and a period that has not ended at the end."""
    algorithm = asynchronous(
        mode="sync", currency="deltas", servers=servers_of(comm, apart), **period
    )
    learner = learner_of(comm, algorithm, optimizer)
    if not learner.serves:
        own, rank = learner.comm, learner.comm.rank
        twin = Learner(starting_point(), optimizer, ModelAveragingSGD(**period), own)
        for step in range(steps):
            m = few_samples_of(rank, step)
            for trained in (learner, twin):
                put_gradient(trained, step, m)
                trained.step(samples=m)
            alike(learner.parameters.flat, twin.parameters.flat, step)
            alike(learner.state.base, twin.state.start, step)
        twin.finish()
    final = finished(comm, learner)
    if not learner.serves:
        alike(final, twin.parameters.flat)


def not_ahead_of_the_slowest_is_data_parallel(
    comm: Communicator, apart: bool, steps: int = 6
) -> None:
    """SSP(0) with the mean of pushes: DataParallelSGD with plain SGD and even minibatches."""
    algorithm = asynchronous(
        mode="bounded", staleness=0, merge="mean", servers=servers_of(comm, apart)
    )
    learner = learner_of(comm, algorithm, SGD(lr=0.2))
    random = np.random.default_rng([24, comm.rank])
    if not learner.serves:
        twin = Learner(starting_point(), SGD(lr=0.2), DataParallelSGD(), learner.comm)
        for step in range(steps):
            time.sleep(random.random() * 2e-3)
            for trained in (learner, twin):
                put_gradient(trained, step, 3)
                trained.step(samples=3)
            alike(learner.parameters.flat, twin.parameters.flat, step)
    final = finished(comm, learner)
    if not learner.serves:
        alike(final, twin.parameters.flat)


def leads_by(comm: Communicator, apart: bool, steps: int = 8, **options: Any) -> int:
    """How many clocks a worker has led a slow one by, as all have seen it; -1 without others.

    The last worker begins only once the others are so far as `ahead` says, and is slow.
    """
    ahead = options.pop("ahead")
    algorithm = asynchronous(servers=servers_of(comm, apart), **options)
    learner = learner_of(comm, algorithm, SGD(lr=0.1))
    if learner.serves:
        finished(comm, learner)
        return comm.allgather_object(None)[0]
    own = learner.comm
    slow = own.rank == own.size - 1
    began, ended = [], []
    learner.state.client  # a server beside this worker begins  # noqa: B018
    for step in range(steps):
        if step == (0 if slow else ahead):
            own.barrier()
        time.sleep(0.02 * slow if step == 0 else 2e-3 * slow)
        began.append(time.monotonic())  # of all processes of a machine
        put_gradient(learner, step, 1)
        learner.step(samples=1)
        ended.append(time.monotonic())
    finished(comm, learner)
    traces = own.allgather_object((began, ended))
    leads = [-1]
    for k, (_, ends) in enumerate(traces):
        for other, (begins, _) in enumerate(traces):
            if other != k:  # at the end of a step, pushes of the other that may have been there
                leads += [c - sum(b < end for b in begins) for c, end in enumerate(ends, 1)]
    return comm.allgather_object(max(leads))[0]


def the_bound_holds(comm: Communicator, apart: bool, staleness: int) -> None:
    """No worker goes on more than so many clocks ahead of the slowest, and so many it may."""
    lead = leads_by(comm, apart, mode="bounded", staleness=staleness, ahead=staleness)
    several = comm.size - servers_of(comm, apart) > 1
    assert lead == (staleness if several else -1)


def a_pipeline_is_one_step_late(comm: Communicator, steps: int = 8, **options: Any) -> None:
    """One worker: x_{t+1} = x_t - lr g(x_{t-1}), and the worker has x_{t-1}.

    Its gradients are of the model that was pulled before the last one, and counted as such.
    """
    algorithm = asynchronous(pipeline=True, servers=comm.size - 1, **options)
    learner, compensation = learner_of(comm, algorithm, SGD(lr=0.2)), algorithm.delay_compensation
    if not learner.serves:
        x = [starting_point().flat.copy()] * 2  # x_{t-1}, x_t
        for step in range(steps):
            m = 1 + step % 3
            alike(learner.parameters.flat, x[0], f"step {step}")
            put_gradient(learner, step, m)
            g = gradient_at(x[0], 0, step, m) / m
            learner.step(samples=m)
            x = [x[1], x[1] - 0.2 * (g + compensation * g * g * (x[1] - x[0]))]
    final = finished(comm, learner)
    if not learner.serves:
        alike(final, x[1])
        assert learner.state.client.versions == [steps] * learner.state.client.servers
        assert dict(learner.state.table[0].staleness) == {0: 1, 1: steps - 1}


def what_few_bits_lose_is_not_lost(
    comm: Communicator, apart: bool, bits: float, **options: Any
) -> None:
    """What was applied and the residuals of all workers are the sum of all gradients, less what a
    `residual_decay` forgets before every push."""
    algorithm = asynchronous(
        servers=servers_of(comm, apart),
        gradient_bits=bits,
        **({"block_size": 16} if bits < 16 else {}),
        **options,
    )
    learner = learner_of(comm, algorithm, SGD(lr_per_sample=1.0), np.float32)
    workers = comm.size - algorithm.servers
    counts = [7 + 6 * k for k in range(workers)]
    residuals, forgotten = np.zeros(N), 1 - algorithm.residual_decay
    if not learner.serves:
        rank = learner.comm.rank
        for step in range(counts[rank]):
            if step % algorithm.sync_steps == algorithm.sync_steps - 1 and forgotten:
                residuals += forgotten * learner.state.residual
            learner.gradient.flat[:] = gradient_of(rank, step, N)
            learner.step(samples=1 + (rank + step) % 2)
        assert learner.state.gathered_samples, "nothing is left for `finish` to push"
        if forgotten:
            residuals += forgotten * learner.state.residual
    final = finished(comm, learner)
    if not learner.serves:
        residuals += learner.state.residual if bits < 32 else 0
        pushes = -(-counts[rank] // algorithm.sync_steps)
        assert learner.state.table[rank].pushes == pushes
        assert bits == 32 or residuals.any(), "a lossy codec that loses nothing"
    inputs = sum(
        gradient_of(k, step, N).astype(float) for k in range(workers) for step in range(counts[k])
    )
    lost = np.sum(comm.allgather_object(residuals), axis=0)
    applied = starting_point().flat - final.astype(float)
    largest = max(1.0, np.abs(inputs).max(), np.abs(final).max())
    assert np.abs(applied + lost - inputs).max() <= 8 * ROUNDING * sum(counts) * largest
    same_on_all_ranks(comm, final)
