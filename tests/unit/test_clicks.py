"""Made-up clicks: functions of seed and number, a power law, and the loss that is possible."""

from __future__ import annotations

import numpy as np
import pytest

from parallel_sgd.data import Clicks, clicks
from parallel_sgd.errors import UserError


def test_samples_are_functions_of_their_number_and_the_seed():
    data = Clicks(1000, 5, seed=3)
    x, y = data.arrays()
    assert x.dtype == np.int64 and x.shape == (1000, 5) and y.dtype == np.int64
    later = Clicks(400, 5, seed=3, first=600)
    assert (later.arrays()[0] == x[600:]).all() and (later.arrays()[1] == y[600:]).all()
    assert (later.probabilities(np.arange(400)) == data.probabilities(np.arange(600, 1000))).all()
    other = Clicks(1000, 5, seed=4).arrays()[0]
    assert (other != x).mean() > 0.9


def test_they_are_today_what_they_were():
    """Golden: a hash that changed would make old checkpoints' rows those of other ids."""
    x, y = Clicks(4, 2, seed=0, exponent=1.0).arrays()
    assert x.tolist() == [
        [1095595977691501743, 8068892589900051544],
        [1745098526323613446, 1925527723319597219],
        [4192258096715923064, 5343135348947797619],
        [6450363917870082237, 6862816537655423680],
    ] and y.tolist() == [0, 1, 1, 1]


def test_ids_are_spread_far_and_fields_share_none():
    x, _ = Clicks(20_000, 4).arrays()
    assert x.min() >= 0 and x.max() > 2**62
    assert np.histogram(np.unique(x), 8, (0, 2.0**63))[0].std() < 200
    for i in range(4):
        for j in range(i):
            assert not set(x[:, i].tolist()) & set(x[:, j].tolist())


@pytest.mark.parametrize("exponent", [0, 0.5, 1.0, 1.2, 2.0])
def test_ids_follow_the_power_law(exponent):
    """Shares of the most frequent ranks, against the distribution function of the docstring."""
    vocabulary, samples = 1000, 40_000
    data = Clicks(samples, 1, vocabulary=vocabulary, exponent=exponent)
    _, counts = np.unique(data.arrays()[0], return_counts=True)
    shares = np.sort(counts)[::-1].cumsum() / samples
    ranks = np.arange(1, vocabulary + 1)
    if exponent == 1:
        expected = np.log(ranks + 1) / np.log(vocabulary + 1)
    else:
        t = 1 - exponent
        expected = ((ranks + 1) ** t - 1) / ((vocabulary + 1) ** t - 1)
    slack = 0.08 if exponent == 0 else 0.03  # sorting by counts favours what chance favoured
    assert abs(shares[[0, 9, 99]] - expected[[0, 9, 99]]).max() < slack
    assert len(counts) <= vocabulary


def test_most_ids_of_a_large_vocabulary_never_occur_and_some_are_everywhere():
    train, _ = clicks()
    x, _ = train.arrays()
    distinct, counts = np.unique(x, return_counts=True)
    assert train.vocabulary == 10**11 and 200_000 < len(distinct) < 400_000
    assert (counts == 1).mean() > 0.5 and counts.max() > 0.1 * len(train)


def test_labels_are_drawn_with_the_true_probabilities():
    data = Clicks(50_000, 6)
    p, (_, y) = data.probabilities(np.arange(len(data))), data.arrays()
    assert set(np.unique(y)) == {0, 1}
    for low in np.arange(0, 1, 0.2):
        some = (low <= p) & (p < low + 0.2)
        assert y[some].mean() == pytest.approx(p[some].mean(), abs=0.02)
    odds = np.log(p / (1 - p))
    assert odds.std() == pytest.approx(2, rel=0.35)  # the most frequent ids weigh much


def test_the_bayes_loss_is_that_of_the_true_probabilities():
    data = Clicks(70_000)  # more than are looked at together
    p, (_, y) = data.probabilities(np.arange(len(data))), data.arrays()
    loss = -np.where(y == 1, np.log(p), np.log1p(-p)).mean()
    assert data.bayes_loss() == pytest.approx(loss, abs=0.01)
    assert data.bayes_loss() == pytest.approx(-(p * np.log(p) + (1 - p) * np.log1p(-p)).mean())
    wrong = 1 / (1 + np.exp(-0.8 * np.log(p / (1 - p))))
    assert -(p * np.log(wrong) + (1 - p) * np.log1p(-wrong)).mean() > data.bayes_loss()


def test_certain_clicks_have_no_entropy():
    for bias in (-100, 100):
        data = Clicks(10, bias=bias, deviation=1)
        assert 0 <= data.bayes_loss() < 1e-9
        assert (data.arrays()[1] == (bias > 0)).all()
    assert Clicks(10, bias=0, deviation=0).bayes_loss() == pytest.approx(np.log(2))
    assert np.isfinite(Clicks(10, fields=1000, deviation=100).bayes_loss())


def test_training_and_test_share_the_weights_and_no_sample():
    train, test = clicks(1000, 3, test=0.25, seed=2)
    assert (len(train), len(test), test.first) == (750, 250, 750)
    whole = Clicks(1000, 3, seed=2)
    assert (test.arrays()[0] == whole.arrays()[0][750:]).all()
    assert len(clicks(100, test=7)[1]) == 7


def test_bad_arguments_are_refused():
    for message, options in [
        ("samples=0 must be a whole number, at least 1", {"samples": 0}),
        ("fields=0 must be a whole number from 1 to 32768", {"fields": 0}),
        ("vocabulary=281474976710656 must be a whole number from 1", {"vocabulary": 1 << 48}),
        ("exponent=-1 must be a finite number, at least 0", {"exponent": -1}),
        ("seed=-1 must be a whole number, at least 0", {"seed": -1}),
        ("first=.* are too large together", {"first": 1 << 62}),
    ]:
        with pytest.raises(UserError, match="^" + message):
            Clicks(**{"samples": 10, **options})
    for test in (0, 100, 0.0, 1.0, 0.001):
        with pytest.raises(UserError, match="must leave at least one of 100 samples"):
            clicks(100, test=test)
