"""A session trains as a loop of one's own does, and measures what all ranks have in common."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from sessions import (
    SAMPLES,
    SIZE,
    TESTED,
    data,
    learner_of,
    looped,
    model,
    trained,
    without_seconds,
)

import parallel_sgd as psgd
from parallel_sgd.data import RankSource, Source

pytestmark = [pytest.mark.threads(1, 3), pytest.mark.ranks(3)]

ALGORITHMS = {
    "data-parallel": psgd.DataParallelSGD(gradient_bits=4),
    "block-momentum": psgd.BlockMomentumSGD(sync_steps=4),
    "warm start": psgd.DataParallelSGD(distributed_after=20),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_the_loop(comm, name):
    """Whatever else it does in between: the same bits."""
    validation = psgd.CrossValidation(data=data(TESTED, 1), every=25)
    options = {"validation": validation, "progress_every": 17}
    session, rows = trained(comm, ALGORITHMS[name], dtype=np.float32, **options)
    assert np.array_equal(session, looped(comm, ALGORITHMS[name], dtype=np.float32))
    assert not np.array_equal(session, model(np.float32).parameters.flat)
    assert rows[-1].samples == 3 * SAMPLES
    assert rows[-1].metrics["validation_loss"] < rows[0].metrics.get("validation_loss", 9)


@pytest.mark.parametrize(
    ("follows", "per_sample", "factor"),
    [
        (None, False, lambda grown: 1),
        ("constant", False, lambda grown: 1),
        ("linear", False, lambda grown: grown),
        ("sqrt", False, math.sqrt),
        (None, True, lambda grown: 1),
        ("constant", True, lambda grown: 1 / grown),
        ("sqrt", True, lambda grown: 1 / math.sqrt(grown)),
    ],
)
def test_minibatches_that_grow(comm, follows, per_sample, factor):
    sizes = {0: 12, 50: 24}
    rate = {"lr_per_sample": 0.01} if per_sample else {"lr": 0.1}

    def rates(samples):
        return factor(2 if samples >= 50 else 1)

    session, rows = trained(
        comm, optimizer=psgd.SGD(**rate), minibatch_size=sizes, rate_follows=follows
    )
    loop = looped(comm, optimizer=psgd.SGD(**rate), minibatch_size=sizes, rates=rates)
    assert np.abs(session - loop).max() < 1e-12
    assert [row.minibatch_size for row in rows] == [24, 24, 24]
    expected = next(iter(rate.values())) * factor(2)
    assert rows[0].learning_rate == pytest.approx(expected)


BY_THEMSELVES = {
    "SlowMo": psgd.SlowMo(sync_steps=2),
    "SlowMo, overlap": psgd.SlowMo(sync_steps=2, overlap_samples=12),
    "DiLoCo": psgd.DiLoCo(sync_steps=2),
    "rounds of updates": psgd.DataParallelASGD(
        mode="sync", currency="deltas", servers=0, sync_steps=2
    ),
}


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.parametrize("name", BY_THEMSELVES)
def test_a_rate_that_follows_is_that_of_a_schedule(comm, name):
    """To the last bit, also where the algorithm makes use of the rate itself."""
    growing = {"minibatch_size": {0: 12, 60: 36}, "dtype": np.float32}
    rises = psgd.schedules.Steps({0: 0.1, 60: 3 * 0.1})
    scheduled, _ = trained(comm, BY_THEMSELVES[name], psgd.SGD(lr=rises), **growing)
    follows, rows = trained(
        comm, BY_THEMSELVES[name], psgd.SGD(lr=0.1), rate_follows="linear", **growing
    )
    assert np.array_equal(scheduled, follows)
    assert rows[-1].learning_rate == pytest.approx(0.3)
    constant, _ = trained(comm, BY_THEMSELVES[name], psgd.SGD(lr=0.1), **growing)
    assert not np.array_equal(constant, follows)


def test_the_factor_on_the_rate_ends_with_its_session(comm):
    own = model()
    with learner_of(comm, own) as learner:
        seen: list[float] = []
        psgd.TrainingSession(
            learner=learner,
            objective=own,
            train=data(),
            minibatch_size={0: 12, 24: 24},
            rate_follows="linear",
            callbacks=[lambda row: seen.append(learner.local_step.state.lr_factor)],
        ).run()
        assert seen == [2.0] and learner.local_step.mean_lr(12) == 0.2


def test_gradients_are_added_up_from_pieces(comm):
    whole, rows = trained(comm)
    pieces, others = trained(comm, microbatch_size=1)
    alone, serial = trained(psgd.Communicator.single())
    assert np.abs(whole - pieces).max() < 1e-12 and np.abs(whole - alone).max() < 1e-12
    for row, other, its in zip(rows, others, serial, strict=True):
        assert row.train_loss == pytest.approx(other.train_loss, abs=1e-12)
        assert row.train_loss == pytest.approx(its.train_loss, abs=1e-12)


@pytest.mark.parametrize("tested", [1, TESTED])
def test_what_is_measured_is_the_mean_over_all_samples(comm, tested):
    """Also where some ranks have none of them; with several metrics of one's own."""
    test = data(tested, seed=1)
    metrics = {
        "largest": lambda outputs, y: np.abs(outputs).max(axis=1).mean(),
        "first": lambda outputs, y: (y == 0).mean(),
    }
    own = model()
    with learner_of(comm, own) as learner:
        objective = psgd.training.ModelObjective(own, metrics)
        session = psgd.TrainingSession(
            learner=learner,
            objective=objective,
            train=data(),
            test=test,
            validation=psgd.CrossValidation(data=test, name="seen", batch=2),
            epochs=2,
        )
        last = session.run()[-1]
    x, y = test.arrays(dtype=np.float64)
    loss, accuracy = own.evaluate(x, y)
    outputs = own.predict(x)
    expected = {
        "loss": loss,
        "accuracy": accuracy,
        "largest": np.abs(outputs).max(axis=1).mean(),
        "first": (y == 0).mean(),
    }
    for name, value in expected.items():
        assert last.metrics[f"seen_{name}"] == pytest.approx(value, abs=1e-12)
        assert last.metrics[f"test_{name}"] == pytest.approx(value, abs=1e-12)


def test_scores_that_are_no_means(comm):
    """R² of all samples is not the mean of the ranks' own."""
    random = np.random.default_rng(3)
    x = random.standard_normal((50, 4))
    train = psgd.data.Arrays(x, x @ np.array([1.0, 2, 0, -1]) + 0.1 * random.standard_normal(50))
    own = psgd.models.MLP([4, 1], loss="squared", dtype=np.float64)
    with learner_of(comm, own, optimizer=psgd.SGD(lr=0.1)) as learner:
        session = psgd.TrainingSession(
            learner=learner, objective=own, train=train, test=train, epochs=20
        )
        last = session.run()[-1]
    x, y = train.arrays(dtype=np.float64)
    assert last.metrics["test_r2"] == pytest.approx(own.evaluate(x, y)[1], abs=1e-12)
    assert last.metrics["test_r2"] > 0.9


def test_a_metric_may_be_no_number(comm):
    """Of one's own; the loss may not."""
    own = model()
    with learner_of(comm, own) as learner:
        objective = psgd.training.ModelObjective(own, {"undefined": lambda outputs, y: math.nan})
        rows = psgd.TrainingSession(
            learner=learner, objective=objective, train=data(), test=data(TESTED)
        ).run()
    assert rows[-1].metrics["test_undefined"] is None and rows[-1].metrics["test_loss"] > 0


def test_callbacks_see_every_row_and_end_training_on_all_ranks(comm):
    seen = []

    def two_are_enough(row):
        seen.append(row)
        return not (comm.rank == comm.size - 1 and len(seen) == 2)

    _, rows = trained(comm, epochs=9, callbacks=[two_are_enough, lambda row: None])
    assert [row.samples for row in rows] == [SAMPLES, 2 * SAMPLES]
    assert rows[-1].event == "ended by a callback"
    assert without_seconds(seen[:1]) == without_seconds(rows[:1])
    told = without_seconds(rows)
    assert comm.allgather_object(told) == [told] * comm.size


def test_training_ends_where_it_no_longer_improves(comm):
    """A rate of 0 never does."""
    validation = psgd.CrossValidation(data=data(TESTED, 1), patience=2, restore_best=True)
    _, rows = trained(comm, optimizer=psgd.SGD(lr=0.0), epochs=9, validation=validation)
    assert [row.epoch for row in rows] == [1, 2, 3]
    restored = f"restored the model of {SAMPLES} samples"
    assert rows[-1].event == f"ended: no better model in 2 cross-validations; {restored}"


def test_the_best_model_is_restored(comm):
    """Of rates that at first learn, and then destroy."""
    test = data(TESTED, 1)
    validation = psgd.CrossValidation(data=test, restore_best=True, criterion="accuracy")
    rates = psgd.schedules.Steps({0: 0.3, 4 * SAMPLES: 50.0})
    session, rows = trained(comm, optimizer=psgd.SGD(lr=rates), epochs=6, validation=validation)
    accuracies = [row.metrics["validation_accuracy"] for row in rows]
    best = 1 + int(np.argmax(accuracies[:-1]))
    alone = looped(comm, optimizer=psgd.SGD(lr=rates), epochs=best)
    assert np.array_equal(session, alone)
    assert accuracies[-1] == max(accuracies)
    assert rows[-1].event == f"restored the model of {best * SAMPLES} samples"


@pytest.mark.parametrize("answer", [False, np.False_])
def test_a_callback_ends_training(comm, answer):
    """On one rank, and also with NumPy's answer, as a comparison of its numbers gives it."""
    callback = [lambda row: answer if comm.rank == comm.size - 1 else None]
    _, rows = trained(comm, callbacks=callback)
    assert [(row.epoch, row.event) for row in rows] == [(1, "ended by a callback")]


def test_sources_of_minibatches(comm):
    """With sizes, epochs and orders of their own; and data of each rank."""
    session, _ = trained(
        comm,
        train=Source(data(), minibatch_size=SIZE, epochs=3, dtype=np.float64, classes=3),
        minibatch_size=None,
        epochs=None,
    )
    assert np.array_equal(session, looped(comm))
    own = data(10 + comm.rank, seed=comm.rank)
    source = RankSource(own, minibatch_size=SIZE, epochs=2, dtype=np.float64, classes=3)
    _, rows = trained(comm, train=source, minibatch_size=None, epochs=None)
    assert [row.epoch for row in rows] == [1, 2]
    assert rows[-1].samples == 2 * sum(comm.allgather_object(len(own)))


def test_one_session_after_another(comm):
    """The second begins where the first has ended: in an order of its own epochs."""
    own = model()
    with learner_of(comm, own) as learner:
        for epochs in (2, 1):
            session = psgd.TrainingSession(
                learner=learner, objective=own, train=data(), minibatch_size=SIZE, epochs=epochs
            )
            rows = session.run()
            assert [row.epoch for row in rows] == [1, 2][:epochs]
    assert rows[-1].samples == 3 * SAMPLES
    assert not np.array_equal(own.parameters.flat, looped(comm, epochs=2))


def test_what_a_run_leaves_behind(comm, tmp_path):
    folder = comm.allgather_object(tmp_path)[0] / "run"
    told = []
    run = psgd.RunFolder(folder, {"note": "mine"}, config="a = 1\n", tensorboard=True, plot=True)
    parameters, rows = trained(
        comm,
        folder=run,
        report=told.append,
        test=data(TESTED, 1),
        progress_bar=True,
    )
    comm.barrier()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == [row.as_dict() for row in rows]
    assert told == (rows if comm.rank == 0 else [])
    with np.load(folder / "model.npz") as saved:
        flat = np.concatenate([saved[name].ravel() for name in saved])
    assert np.array_equal(flat, parameters)
    assert (folder / "config.toml").read_text() == "a = 1\n"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events*"))
    for rank in range(comm.size):
        log = (folder / "logs" / f"rank-{rank:05d}.log").read_text()
        assert "begin: process" in log and f"{3 * SAMPLES} samples" in log


@pytest.mark.threads(3)
@pytest.mark.parametrize("ends", [False, True])
def test_asynchronous_workers(comm, ends):
    """They meet only where training may end; the final test is of all of them."""
    algorithm = psgd.DataParallelASGD(servers=1, sync_period=SIZE)
    options = {"callbacks": [lambda row: row.epoch < 2]} if ends else {}
    own = model(np.float32)
    with learner_of(comm, own, algorithm) as learner:
        session = psgd.TrainingSession(
            learner=learner,
            objective=own,
            train=data(),
            minibatch_size=SIZE,
            epochs=4,
            validation=psgd.CrossValidation(data=data(TESTED, 1)),
            test=data(TESTED, 2),
            **options,
        )
        rows = session.run()
        serves, worker = learner.serves, learner.comm.rank
    if serves or (worker and not ends):
        assert rows == []
        return
    assert [row.epoch for row in rows] == ([1, 2] if ends else [1, 2, 3, 4])
    x, y = data(TESTED, 2).arrays()
    assert rows[-1].metrics["test_loss"] == pytest.approx(own.evaluate(x, y)[0], rel=1e-5)


class MeanToken(psgd.Objective):
    """Trains a model on samples, and is tested on sequences: the mean of their tokens."""

    def __init__(self, own):
        self.backward = psgd.training.ModelObjective(own).backward
        self.classes = own.classes

    def backward(self, learner, pieces): ...

    def evaluate(self, batch):
        return {"loss": float(batch[0].values.sum()) / batch[0].tokens}


def test_sequences_to_test_on(comm):
    lists = [np.arange(1.0, 2.0 + i) for i in range(TESTED)]
    sequences = psgd.data.SequenceArrays(lists, np.zeros(TESTED, np.int64))
    own = model(np.float32)
    with learner_of(comm, own) as learner:
        rows = psgd.TrainingSession(
            learner=learner, objective=MeanToken(own), train=data(), test=sequences
        ).run()
    assert rows[-1].metrics["test_loss"] == pytest.approx(np.concatenate(lists).mean())
