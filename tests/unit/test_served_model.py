"""One server's part of a model: what pushes do to it, whom it keeps waiting, what it remembers."""

from __future__ import annotations

import numpy as np
import pytest

from parallel_sgd import SGD, Adam, MomentumSGD, Parameters, UserError
from parallel_sgd.optimizers import OPTIMIZERS
from parallel_sgd.parameter_server import Rules, ServedModel
from parallel_sgd.parameter_server.served import COUNTERS_PER_WORKER, SERVER_COUNTERS

N = 12


def in_place(x):
    return x


def served(workers=3, optimizer=None, bits=32, dtype=np.float64, unread=in_place, **rules):
    initial = Parameters({"a": np.arange(8, dtype=dtype), "b": np.ones((2, 2), dtype)})
    rules = Rules(**{"merge": "sum", "gradient_bits": bits, **rules})
    return ServedModel(initial, optimizer or SGD(lr=0.5), rules, workers, unread)


def vector(worker, step):
    return np.random.default_rng([3, worker, step]).integers(-8, 8, N) + worker / 4.0


def push(model, worker, step=0, samples=1, factor=1.0):
    payload = vector(worker, step).view(np.uint8).copy() if samples else np.empty(0, np.uint8)
    return model.push(worker, payload, samples, factor)


def goes(model):
    return [worker for worker in range(len(model.clocks)) if model.may_answer(worker)]


START = np.concatenate([np.arange(8.0), np.ones(4)])


def test_a_push_of_gradients_steps_the_optimizer():
    model = served()
    assert push(model, 1, samples=4, factor=0.5) == 0
    np.testing.assert_allclose(model.x, START - 0.5 * 0.5 * vector(1, 0) / 4, rtol=1e-12)
    assert (model.version, model.samples) == (1, 4)
    assert (model.clocks, model.pushes) == ([0, 1, 0], [0, 1, 0])


def test_a_push_of_deltas_is_taken_off():
    model = served(currency="deltas")
    push(model, 2, samples=4, factor=0.5)
    np.testing.assert_allclose(model.x, START - vector(2, 0), rtol=1e-12)
    assert (model.version, model.samples) == (1, 4)


@pytest.mark.parametrize("currency", ["gradients", "deltas"])
def test_the_mean_counts_every_worker(currency):
    model = served(workers=4, currency=currency, merge="mean")
    push(model, 2)
    rate = 0.5 if currency == "gradients" else 1.0
    np.testing.assert_allclose(model.x, START - rate / 4 * vector(2, 0), rtol=1e-12)


def test_a_push_without_samples_only_moves_the_clock():
    model = served()
    push(model, 0, samples=0)
    assert np.array_equal(model.x, START)
    assert (model.version, model.samples) == (0, 0)
    assert (model.clocks, model.pushes) == ([1, 0, 0], [0, 0, 0])


def test_staleness_is_counted_from_the_pull():
    model = served()
    assert [push(model, 0, step) for step in range(3)] == [0, 1, 2]
    model.give(1)
    assert [push(model, 1), push(model, 2)] == [0, 4]
    assert np.array_equal(model.give(2), model.x)
    assert push(model, 2) == 0


@pytest.mark.parametrize(("mode", "merge", "divisor"), [("async", "sum", 1), ("sync", "mean", 3)])
def test_few_bits_are_decoded(mode, merge, divisor):
    """Every push, though all are decoded into one buffer."""
    model = served(mode=mode, merge=merge, bits=16, dtype=np.float32)
    codec, (least, most) = model.rules.codec(16), model.push_bytes(16)
    assert least == most == 2 * N
    payload = np.empty(most, "u1")
    blocks = codec.blocks(model.parameters)
    for worker in range(3):
        gradient = vector(worker, 0).astype(np.float32)  # has few digits
        codec.encode(blocks, gradient, np.zeros(N, np.float32), payload)
        model.push(worker, payload, 1, 1.0, 16)
    change = 0.5 * sum(vector(worker, 0) for worker in range(3)) / divisor
    np.testing.assert_allclose(model.x, START - change, rtol=1e-5)


def test_delay_compensation():
    model = served(delay_compensation=0.25)
    model.give(1)
    push(model, 0, samples=2)
    backup, x, g = START, model.x.copy(), vector(1, 0) / 2
    push(model, 1, samples=2)
    np.testing.assert_allclose(model.x, x - 0.5 * (g + 0.25 * g * g * (x - backup)), rtol=1e-12)


@pytest.mark.parametrize("merge", ["mean", "sum"])
@pytest.mark.parametrize("currency", ["gradients", "deltas"])
def test_a_round_is_one_change(merge, currency):
    model = served(mode="sync", merge=merge, currency=currency)
    samples, factors = [3, 1, 4], [0.5, 0.75, 0.25]  # gradients: the largest counts
    for worker in (2, 0):
        push(model, worker, samples=samples[worker], factor=factors[worker])
        assert not model.may_answer(worker)
        assert np.array_equal(model.x, START)
    push(model, 1, samples=1, factor=0.75)
    assert goes(model) == [0, 1, 2]
    vectors = [vector(worker, 0) for worker in range(3)]
    if currency == "gradients":
        means = [v / m for v, m in zip(vectors, samples, strict=True)]
        change = 0.5 * 0.75 * (sum(vectors) / 8 if merge == "mean" else sum(means))
    else:
        weights = np.divide(samples, 8) if merge == "mean" else np.ones(3)
        change = weights @ vectors
    np.testing.assert_allclose(model.x, START - change, rtol=1e-12)
    assert (model.version, model.samples, model.pushes) == (1, 8, [1, 1, 1])


@pytest.mark.parametrize("merge", ["mean", "sum"])
def test_a_round_at_a_rate_per_sample_is_the_sum_of_its_pushes(merge):
    model = served(mode="sync", merge=merge, optimizer=SGD(lr_per_sample=0.5))
    for worker in range(3):
        push(model, worker, samples=1 + worker)
    change = 0.5 * sum(vector(worker, 0) for worker in range(3))
    np.testing.assert_allclose(model.x, START - change, rtol=1e-12)


def test_a_round_has_the_same_bits_in_any_order():
    finals = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        model = served(mode="sync", optimizer=Adam(lr=0.1))
        for step in range(3):
            for worker in order:
                push(model, worker, step, samples=1 + worker)
        finals.append(model.x.tobytes())
    assert len(set(finals)) == 1


def test_a_round_of_nothing_changes_nothing():
    model = served(mode="sync")
    for worker in range(3):
        push(model, worker, samples=0)
    assert goes(model) == [0, 1, 2]
    assert (model.version, model.clocks, model.pushes) == (0, [1, 1, 1], [0, 0, 0])


def test_who_leaves_in_the_midst_of_a_round_is_not_waited_for():
    model = served(mode="sync", merge="mean")
    push(model, 0, samples=2)
    push(model, 2, samples=2)
    assert goes(model) == [1]
    model.leave(1)
    assert goes(model) == [0, 1, 2]
    change = 0.5 * (vector(0, 0) + vector(2, 0)) / 4
    np.testing.assert_allclose(model.x, START - change, rtol=1e-12)
    push(model, 2)
    assert not model.may_answer(2)
    model.leave(0)
    assert model.may_answer(2)
    assert model.version == 2


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_gate_of_a_bound(staleness):
    model = served(mode="bounded", staleness=staleness)
    for step in range(staleness):
        push(model, 0, step)
        assert model.may_answer(0)
    push(model, 0, 9)
    assert not model.may_answer(0)
    push(model, 1)
    assert not model.may_answer(0)  # the slowest is 2
    push(model, 2, samples=0)  # also without samples
    assert goes(model) == [0, 1, 2]
    push(model, 0, 10)
    assert not model.may_answer(0)
    model.leave(1)
    assert not model.may_answer(0)
    model.leave(2)
    assert model.may_answer(0)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.5), MomentumSGD(lr=0.1), Adam(lr=0.1)])
@pytest.mark.parametrize("mode", ["async", "sync", "bounded"])
def test_a_state_is_all_there_is(optimizer, mode):
    bound = {"staleness": 9} if mode == "bounded" else {}
    one, other = (served(optimizer=optimizer, mode=mode, **bound) for _ in range(2))
    for step in range(3):
        for worker in (2, 0, 1):
            push(one, worker, step, samples=(worker + step) % 3)
            if worker != step:
                one.give(worker)
    state = one.state()
    assert state.dtype == np.uint8
    assert len(state) == one.state_bytes
    counters = (
        state[-8 * (SERVER_COUNTERS + 3 * COUNTERS_PER_WORKER) :].copy().view(np.int64).tolist()
    )
    assert counters[:SERVER_COUNTERS] == [one.version, one.local_step.state.steps, one.samples]
    assert counters[SERVER_COUNTERS:] == [*one.clocks, *one.pushes, *one.pulled, *one.based]
    if mode != "sync":
        push(other, 1)  # what it held before does not matter
    other.set_state(state.copy())
    assert np.array_equal(other.state(), state)
    for step in range(3, 5):
        for worker in range(3):
            both = [push(model, worker, step, samples=1 + worker) for model in (one, other)]
            assert both[0] == both[1]
            assert one.may_answer(worker) == other.may_answer(worker)
    assert np.array_equal(other.state(), one.state())


@pytest.mark.parametrize("kind", OPTIMIZERS.values())
@pytest.mark.parametrize(
    ("currency", "mode", "factor"),
    [
        ("gradients", "async", 0.0),
        ("gradients", "async", 0.25),
        ("gradients", "sync", 0.0),
        ("deltas", "async", 0.0),
        ("deltas", "sync", 0.0),
    ],
)
def test_a_model_that_is_being_read_goes_on_elsewhere(kind, currency, mode, factor):
    """With the same bits, and what has been given out stays as it was."""
    given = []  # a vector, and its values when it was given

    def elsewhere(x):
        return np.full_like(x, np.nan)

    one, other = (
        served(
            optimizer=kind(lr=0.1),
            currency=currency,
            mode=mode,
            delay_compensation=factor,
            unread=unread,
        )
        for unread in (in_place, elsewhere)
    )
    states = []
    for step in range(4):
        for worker in (2, 0, 1):
            for model in (one, other):
                push(model, worker, step, samples=(worker + step) % 3)
        states.append(one.state())
        assert np.array_equal(other.state(), states[-1])
        for worker in range(3):
            one.give(worker)
            given.append((other.give(worker), other.x.copy()))
    other.set_state(states[0])
    assert np.array_equal(other.state(), states[0])
    assert len({id(x) for x, _ in given}) == 4
    for x, values in given:
        assert x.tobytes() == values.tobytes()


def test_no_state_in_the_midst_of_a_round():
    model = served(mode="sync")
    push(model, 1)
    with pytest.raises(UserError, match=r"^the model is in the midst of a round: "):
        model.state()


def test_in_a_pipeline_a_push_is_of_the_model_before_the_last():
    model = served(delay_compensation=0.25, pipeline=True)
    given = [START]
    for step in range(4):
        x, backup, g = model.x.copy(), given[max(0, step - 1)], vector(1, step)
        assert push(model, 1, step) == min(step, 1)
        change = g + 0.25 * g * g * (x - backup)
        np.testing.assert_allclose(model.x, x - 0.5 * change, rtol=1e-12)
        given.append(model.give(1).copy())


@pytest.mark.parametrize("pipeline", [False, True])
def test_what_a_worker_had_pulled_is_put_back(pipeline):
    model = served(delay_compensation=0.25, pipeline=pipeline)
    pulled = np.stack([START - np.arange(12), START + 1.0][: 1 + pipeline])
    model.set_backup(1, pulled.reshape(-1).view(np.uint8))
    for step, backup in enumerate(pulled):
        x, g = model.x.copy(), vector(1, step)
        push(model, 1, step)
        change = g + 0.25 * g * g * (x - backup)
        np.testing.assert_allclose(model.x, x - 0.5 * change, rtol=1e-12)
        model.give(1)
    with pytest.raises(UserError, match=r"^\d+ bytes of models must be \d+$"):
        model.set_backup(1, np.zeros(24, np.uint8))
    with pytest.raises(UserError, match="without delay_compensation"):
        served().set_backup(1, START.view(np.uint8))
