"""Sessions in which a loss or a gradient is not finite: skipped, or undone at a lower rate."""

from __future__ import annotations

import numpy as np
import pytest
from sessions import SAMPLES, SIZE, data, learner_of, looped, model, trained

import parallel_sgd as psgd
from parallel_sgd.data import Source

pytestmark = [pytest.mark.threads(3), pytest.mark.ranks(3)]

MARK = 7.0  #: in the bad sample


def marked():
    x, y = data().read(np.arange(SAMPLES))
    x = x.copy()
    x[17, 0] = MARK
    return psgd.data.Arrays(x, y)


def is_bad(x):
    return bool((x[:, 0] == MARK).any())


class Spoiled(psgd.training.ModelObjective):
    """A minibatch with the bad sample has no finite gradient, or no finite loss, on its rank."""

    def __init__(self, own, what):
        super().__init__(own)
        self.what = what

    def backward(self, learner, pieces):
        pieces = list(pieces)
        loss = super().backward(learner, iter(pieces))
        if not any(is_bad(x) for x, _ in pieces):
            return loss
        if self.what == "gradient":
            learner.gradient.flat[3] = np.inf
        return np.nan if self.what == "loss" else loss


def spoiled(comm, what, **options):
    """The parameters, the rows, and how many minibatches were left out."""
    own = model()
    with learner_of(comm, own) as learner:
        rows = psgd.TrainingSession(
            learner=learner,
            objective=Spoiled(own, what),
            train=marked(),
            minibatch_size=SIZE,
            epochs=3,
            **options,
        ).run()
        assert not learner.skipped.skips  # that was the session's
    return own.parameters.flat.copy(), rows


def by_hand(comm):
    """The parameters of a loop that leaves the minibatch out."""
    own = model()
    source = Source(marked(), minibatch_size=SIZE, epochs=3, dtype=np.float64, classes=3)
    with learner_of(comm, own) as learner:
        for x, y in source.minibatches(learner):
            own.gradient(x, y, out=learner.gradient)
            learner._training_step.take(len(x), skip=any(comm.allgather_object(is_bad(x))))
        learner.finish()
    return own.parameters.flat.copy()


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_a_bad_sample_costs_its_minibatch(comm, what):
    parameters, rows = spoiled(comm, what, not_finite="skip")
    assert np.array_equal(parameters, by_hand(comm))
    assert all(row.event.startswith("1 minibatches skipped: the ") for row in rows)
    assert all(0 < row.train_loss < 3 for row in rows)
    told = rows[-1].details["skipped"]
    assert (told["minibatches"], told["samples"]) == (3, 3 * SIZE)
    assert f"the {what} is not finite" in told["latest"]


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_by_default_it_ends_training(comm, what):
    message = {"gradient": "the gradient is not finite", "loss": "training has diverged"}[what]
    with pytest.raises(psgd.UserError, match=message):
        spoiled(comm, what)


def test_a_session_does_not_skip_for_ever(comm):
    policy = psgd.NotFinitePolicy(not_finite="skip", not_finite_most=0)
    with pytest.raises(psgd.UserError, match="1 times in a row, and at most not_finite_most=0 min"):
        spoiled(comm, "loss", not_finite=policy)


def reduced(factor, **options):
    return psgd.NotFinitePolicy(
        not_finite="reduce", not_finite_factor=factor, not_finite_keep_every=2 * SIZE, **options
    )


@pytest.mark.parametrize("algorithm", [None, psgd.BlockMomentumSGD(sync_steps=2)])
def test_a_rate_that_is_too_high_is_reduced(comm, algorithm):
    """From the newest good state on, all is as with the lower rate."""
    rates = psgd.schedules.Steps({0: 0.2, 2 * SIZE: 1e30})
    options = {"optimizer": psgd.MomentumSGD(lr=rates), "dtype": np.float32}
    session, rows = trained(comm, algorithm, not_finite=reduced(1e-31), **options)
    (event,) = (row.event for row in rows if row.event)
    assert "not finite" in event
    assert f"learning rate times 1e-31; restored the state of {2 * SIZE} samples" in event
    loop = looped(comm, algorithm, rates=lambda n: 1 if n < 2 * SIZE else 1e-31, **options)
    assert np.array_equal(session, loop)
    assert rows[-1].learning_rate == pytest.approx(0.1)
    assert all(row.train_loss is None or row.train_loss < 3 for row in rows)


def test_a_test_loss_that_is_not_finite_is_undone(comm):
    rates = psgd.schedules.Steps({0: 0.2, 2 * SIZE: 1e36})
    validation = psgd.CrossValidation(data=data(9, 1), every=SIZE)
    options = {"optimizer": psgd.SGD(lr=rates), "dtype": np.float32}
    policy = reduced(1e-37)
    session, rows = trained(comm, validation=validation, not_finite=policy, **options)
    (event,) = (row.event for row in rows if row.event)
    assert event.startswith(f"training has diverged: the validation loss is nan after {3 * SIZE} ")
    loop = looped(comm, rates=lambda n: 1 if n < 2 * SIZE else 1e-37, **options)
    assert np.array_equal(session, loop)


def test_a_state_that_is_finite_but_too_far_gone_is_left(comm):
    """It goes back to the one before: from here no rate would help."""
    rates = psgd.schedules.Steps({0: 0.2, 3 * SIZE: 1e30})
    options = {"optimizer": psgd.SGD(lr=rates), "dtype": np.float32}
    session, rows = trained(comm, not_finite=reduced(1e-16), **options)
    events = [row.event for row in rows if row.event]
    backs = [int(event.split()[-2]) for event in events]
    assert backs == [4 * SIZE, 2 * SIZE]
    loop = looped(comm, rates=lambda n: 1 if n < 2 * SIZE else 1e-16 * 1e-16, **options)
    assert np.array_equal(session, loop)


@pytest.mark.parametrize("what", ["gradient", "loss"])
def test_what_does_not_help_ends_training(comm, what):
    policy = psgd.NotFinitePolicy(not_finite="reduce", not_finite_most=2)
    with pytest.raises(
        psgd.UserError, match=r"not finite 3 times in a row, more than not_finite_most=2"
    ):
        spoiled(comm, what, not_finite=policy)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"not_finite": "ignore"}, "not_finite='ignore' must be"),
        ({"not_finite": 3}, "not_finite must be a NotFinitePolicy"),
        (
            {
                "not_finite": "reduce",
                "algorithm": psgd.DataParallelASGD(servers=0),
            },
            "not_finite='reduce' must not be given with DataParallelASGD",
        ),
        (
            {
                "not_finite": "reduce",
                "algorithm": psgd.DataParallelASGD(servers=0, mode="sync", currency="deltas"),
            },
            "not_finite='reduce' must not be given with DataParallelASGD, whose servers end",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:servers=0")
def test_what_cannot_be_asked_for(comm, given, message):
    with pytest.raises(psgd.UserError, match=message):
        trained(comm, **given)
