"""AutoAdjust: what is tried leaves nothing behind, and what is undone takes all along."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from sessions import SAMPLES, SIZE, TESTED, data, looped, trained, without_seconds

import parallel_sgd as psgd

pytestmark = [pytest.mark.threads(1, 3), pytest.mark.ranks(3)]


def adjusted(comm, rate, **options):
    validation = psgd.CrossValidation(data=data(TESTED, 1))
    return trained(comm, auto_learning_rate=rate, validation=validation, **options)


@pytest.mark.parametrize("optimizer", [psgd.SGD, psgd.MomentumSGD, psgd.Adam])
def test_a_rollback_takes_all_along(comm, optimizer):
    """After it the model is that of training with the lower rate from the best model on: with the
    same samples, in the same order, and the same state of the optimizer."""
    small = 0.002 if optimizer is psgd.Adam else 0.05
    rates = psgd.schedules.Steps({0: small, 2 * SAMPLES: 1000 * small})  # the last ones destroy
    rule = psgd.AutoLearningRate(learn_rate_decrease_factor=0.001)
    session, rows = trained(
        comm,
        optimizer=optimizer(lr=rates),
        epochs=4,
        auto_learning_rate=rule,
        validation=psgd.CrossValidation(data=data()),
    )
    assert [row.epoch for row in rows] == [1, 2, 3, 3, 4]
    assert rows[2].event == "learning rate times 0.001; restored the model of 120 samples"
    loop = looped(
        comm,
        optimizer=optimizer(lr=rates),
        epochs=4,
        rates=lambda samples: 1 if samples < 2 * SAMPLES else 0.001,
    )
    assert np.array_equal(session, loop)


def test_checkpoints_of_abandoned_training_are_forgotten(comm, tmp_path):
    """Else the newest one would not be of where training goes on."""
    folder = comm.allgather_object(tmp_path)[0]
    rates = psgd.schedules.Steps({0: 0.05, 2 * SAMPLES: 50.0})
    adjusted(
        comm,
        psgd.AutoLearningRate(learn_rate_decrease_factor=0.001),
        optimizer=psgd.SGD(lr=rates),
        epochs=4,
        checkpoints=psgd.CheckpointConfig(folder=folder, every=24, keep=99),
    )
    comm.barrier()
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) >= 10 and all(name.isdecimal() for name in names)  # none is there twice


def test_at_the_end_the_best_model_is_the_final_one(comm):
    rates = psgd.schedules.Steps({0: 0.05, 2 * SAMPLES: 50.0})
    session, rows = adjusted(comm, psgd.AutoLearningRate(), optimizer=psgd.SGD(lr=rates), epochs=3)
    assert [row.epoch for row in rows] == [1, 2, 3]
    assert np.array_equal(session, looped(comm, optimizer=psgd.SGD(lr=rates), epochs=2))


def test_rates_fall_and_training_ends(comm):
    rate = psgd.AutoLearningRate(
        reduce_learn_rate_if_improve_less_than=0.99,
        learn_rate_decrease_factor=0.1,
        min_learn_rate=0.001,
    )
    _, rows = adjusted(comm, rate, optimizer=psgd.SGD(lr=0.5), epochs=9)
    rates = [row.learning_rate for row in rows]
    assert rates == pytest.approx([0.5, 0.05, 0.005, 0.0005])
    assert rows[-1].event == (
        "learning rate times 0.1; ended: the learning rate has fallen below 0.001"
    )


def test_rates_rise(comm):
    rate = psgd.AutoLearningRate(increase_learn_rate_if_improve_more_than=0.0)
    _, rows = adjusted(comm, rate, optimizer=psgd.SGD(lr=0.01), epochs=4)
    assert [row.learning_rate for row in rows] == pytest.approx(
        [0.01, 0.01 * 1.382, 0.01 * 1.382**2, 0.01 * 1.382**3]
    )


def test_numbers_that_are_not_finite_are_undone(comm):
    """A step that cannot be taken, since its gradient is not finite."""
    rates = psgd.schedules.Steps({0: 0.2, SAMPLES + SIZE: 1e30})
    rate = psgd.AutoLearningRate(learn_rate_decrease_factor=1e-31)
    session, rows = adjusted(comm, rate, optimizer=psgd.SGD(lr=rates), dtype=np.float32)
    event = next(row.event for row in rows if row.event)
    assert "the gradient is not finite" in event and "restored the model of 60 samples" in event
    factor = np.float64(1e-31)
    loop = looped(
        comm,
        optimizer=psgd.SGD(lr=rates),
        dtype=np.float32,
        rates=lambda n: 1.0 if n < SAMPLES else float(factor),
    )
    assert np.array_equal(session, loop)


def test_without_a_best_model_they_end_training(comm):
    rate = psgd.AutoLearningRate(load_best_model=False)
    with pytest.raises(psgd.UserError, match="not finite"):
        adjusted(comm, rate, optimizer=psgd.SGD(lr=1e30), dtype=np.float32)


@pytest.mark.parametrize("algorithm", [psgd.DataParallelSGD, psgd.BlockMomentumSGD])
def test_trials_of_minibatch_sizes_leave_nothing_behind(comm, algorithm):
    """None is accepted: then all is as without them."""
    how = {"sync_steps": 4} if algorithm is psgd.BlockMomentumSGD else {"gradient_bits": 4}
    auto = psgd.AutoMinibatchSize(
        minibatch_size_tuning_max=512,
        trial_samples=48,
        minibatch_search_criterion_error_margin=0.0,
    )
    options = {"minibatch_size": 64, "train": data(256), "dtype": np.float32}
    options["optimizer"] = psgd.MomentumSGD(lr=0.02)
    with_trials, rows = trained(comm, algorithm(**how), auto_minibatch_size=auto, **options)
    without, others = trained(comm, algorithm(**how), **options)
    assert {row.minibatch_size for row in rows} == {64}
    assert np.array_equal(with_trials, without)
    assert [row.train_loss for row in rows] == [row.train_loss for row in others]


def test_minibatches_grow_where_they_learn_as_well(comm):
    auto = psgd.AutoMinibatchSize(
        minibatch_size_tuning_max=200, minibatch_search_criterion_error_margin=9.0
    )
    _, rows = trained(comm, auto_minibatch_size=auto, minibatch_size=64, train=data(300), epochs=4)
    assert [row.minibatch_size for row in rows] == [64, 128, 192, 192]


def test_a_run_that_is_resumed_goes_on_as_if_nothing_had_been(comm, tmp_path):
    """With rollbacks before, and a minibatch size that was found."""
    folder = comm.allgather_object(tmp_path)[0]
    rates = psgd.schedules.Steps({0: 0.05, 600: 5.0, 1200: 500.0})  # two rollbacks
    options = {
        "optimizer": psgd.MomentumSGD(lr=rates),
        "train": data(300),
        "minibatch_size": 16,
        "auto_minibatch_size": psgd.AutoMinibatchSize(
            minibatch_size_tuning_frequency=2, minibatch_search_criterion_error_margin=0.5
        ),
        "auto_learning_rate": psgd.AutoLearningRate(learn_rate_decrease_factor=0.01),
        "validation": psgd.CrossValidation(data=data(300)),
        "epochs": 6,
    }
    whole, rows = trained(comm, **options)
    assert sum("restored" in (row.event or "") for row in rows) >= 2
    assert len({row.minibatch_size for row in rows}) > 1
    kept = psgd.CheckpointConfig(folder=folder, every=100, resume=True)
    for interrupted_after in (2, 4, 2, 99):

        def interrupt(row, made=[], most=interrupted_after):  # noqa: B006 - counts
            made.append(row)
            if len(made) == most:
                raise RuntimeError("interrupted")

        with pytest.raises(psgd.UserError) if interrupted_after < 99 else nullcontext():
            resumed, others = trained(comm, checkpoints=kept, callbacks=[interrupt], **options)
    assert np.array_equal(whole, resumed)
    assert without_seconds(rows) == without_seconds(others)
    again, others = trained(comm, checkpoints=kept, **options)  # there is nothing left to do
    assert np.array_equal(whole, again) and without_seconds(rows) == without_seconds(others)
