"""Shares of minibatches on ranks: every sample once, the sums of serial SGD, and a log that repeats
a run in every bit."""

from __future__ import annotations

import queue
import threading
from itertools import chain

import numpy as np
import pytest
from invariants import same_bits

from parallel_sgd import (
    DataParallelASGD,
    DataParallelSGD,
    Learner,
    ModelAveragingSGD,
    MomentumSGD,
    TrainingSession,
    UserError,
    simulate,
)
from parallel_sgd.data import Arrays, RankSource, SequenceSource, Source
from parallel_sgd.data.shares import parts
from parallel_sgd.models import MLP
from parallel_sgd.training.shares import EVERY, SHARE
from parallel_sgd.training.step_timer import StepTimer

N, SIZE = 150, 12
RANDOM = np.random.default_rng(5)
X, Y = RANDOM.standard_normal((N, 6)), RANDOM.integers(0, 4, N)
BLOCKS = ModelAveragingSGD(sync_steps=5)


def weights(ranks):
    return tuple([5, 1, 2, 3][:ranks])


def trained(comm, shares, algorithm=None, epochs=2, source=Source, ahead=None):
    """The samples of each minibatch on this rank, the final model, and the log of shares."""
    model = MLP([6, 5, 4], seed=0, dtype=np.float64)
    learner = Learner(model.parameters, MomentumSGD(lr=0.05), algorithm or DataParallelSGD(), comm)
    minibatches = source(
        np.c_[X, np.arange(N)], Y, SIZE, epochs=epochs, dtype=np.float64, shares=shares
    ).minibatches(learner)
    taken = []
    for x, y in minibatches if ahead is None else fetched(minibatches, ahead):
        model.gradient(x[:, :6], y, out=learner.gradient)
        learner.step(samples=len(x))
        taken.append(x[:, 6].astype(int).tolist())
    learner.finish()
    log = (learner.report() or {}).get("shares")
    return taken, model.parameters.flat.copy(), log


def fetched(minibatches, ahead):
    """Minibatches that another thread fetches ahead."""
    waiting = queue.Queue(ahead)

    def fetch():
        try:
            for minibatch in minibatches:
                waiting.put(minibatch)
        finally:
            waiting.put(None)

    threading.Thread(target=fetch, daemon=True).start()
    while (minibatch := waiting.get()) is not None:
        yield minibatch


def require_once_an_epoch(results, epochs=2):
    steps = [[*chain(*parts)] for parts in zip(*(taken for taken, *_ in results), strict=True)]
    assert sorted(chain(*steps)) == sorted([*range(N)] * epochs)
    assert [*map(len, steps)] == ([SIZE] * (N // SIZE) + [N % SIZE]) * epochs


def test_every_sample_once_and_the_sums_of_equal_shares(on_ranks):
    """As numbers of which only the ratios count, and as a schedule."""
    equal = on_ranks(lambda comm: trained(comm, None))
    given = on_ranks(lambda comm: trained(comm, [3.5 * w for w in weights(comm.size)]))
    require_once_an_epoch(given)
    for step, (samples, *_) in enumerate(zip(*(taken for taken, *_ in given), strict=True)):
        size = [SIZE] * (N // SIZE) + [N % SIZE]
        ends = parts(size[step % len(size)], weights(len(given)))
        assert len(samples) == ends[1]
    for (_, model, _), (_, expected, _) in zip(given, equal, strict=True):
        np.testing.assert_allclose(model, expected, rtol=1e-9, atol=1e-11)
    changing = on_ranks(
        lambda comm: trained(comm, {0: (1,) * comm.size, 3 * SIZE: weights(comm.size)})
    )
    require_once_an_epoch(changing)
    for rank, (taken, *_) in enumerate(changing):
        assert taken[:3] == equal[rank][0][:3]
        assert taken[3:] == given[rank][0][3:]


def test_equal_numbers_are_equal_shares_in_every_bit(on_ranks):
    for algorithm in (DataParallelSGD(), BLOCKS):
        equal = on_ranks(lambda comm, algorithm=algorithm: trained(comm, None, algorithm))
        given = on_ranks(lambda comm, a=algorithm: trained(comm, [0.3] * comm.size, a))
        for one, other in zip(given, equal, strict=True):
            assert one[0] == other[0]
            assert same_bits(one[1], other[1])


@pytest.fixture
def speeds(monkeypatch):
    """Rank k measures that it does 1 / (k + 1) of what rank 0 does."""
    started = {}

    def work(self):
        rank = self._world.rank
        started[rank] = started.get(rank, 0) + 1
        return 100, 100.0 * (rank + 1)

    monkeypatch.setattr(StepTimer, "work", work)
    return started


@pytest.mark.parametrize("ahead", [None, 7])
@pytest.mark.parametrize("algorithm", [DataParallelSGD(), BLOCKS], ids=["steps", "blocks"])
def test_measured_shares_follow_the_speeds_and_the_log_repeats_them(speeds, algorithm, ahead):
    """Whether minibatches are fetched ahead on some ranks, or not."""

    def body(comm, shares="measured"):
        fetches = ahead and ahead + 3 * comm.rank
        return trained(comm, shares, algorithm, epochs=4, ahead=fetches)

    measured = simulate(3, body)
    require_once_an_epoch(measured, epochs=4)
    log = {int(samples): shares for samples, shares in measured[0][2].items()}
    assert all(one[2] == measured[0][2] for one in measured)
    mean = (1 + 1 / 2 + 1 / 3) / 3
    expected = [round(SHARE / (rank + 1) / mean) for rank in range(3)]
    assert log.pop(0) == [1, 1, 1]
    assert all(shares == expected for shares in log.values())
    every = EVERY if algorithm is not BLOCKS else -(-EVERY // 5) * 5
    assert len(log) == 4 * -(-N // SIZE) // every
    again = simulate(3, lambda comm: body(comm, {0: [1, 1, 1], **log}))
    for one, other in zip(measured, again, strict=True):
        assert one[0] == other[0]
        assert same_bits(one[1], other[1])


def test_sequences_are_dealt_by_their_tokens(on_ranks):
    lengths = RANDOM.integers(1, 9, 60)

    def body(comm):
        model = MLP([6, 5, 4], seed=0)
        learner = Learner(model.parameters, MomentumSGD(lr=0.05), DataParallelSGD(), comm)
        source = SequenceSource(
            [np.full((n, 1), i) for i, n in enumerate(lengths)],
            [*range(60)],
            100,
            shares=weights(comm.size),
        )
        tokens, numbers = [], []
        for x, y in source.minibatches(learner):
            learner.step(samples=x.tokens)
            tokens.append(x.tokens)
            numbers += y.tolist()
        return tokens, numbers

    results = on_ranks(body)
    assert sorted(chain(*(numbers for _, numbers in results))) == [*range(60)]
    given, total = weights(len(results)), int(lengths.sum())
    for share, (tokens, _) in zip(given, results, strict=True):
        ideal = share / sum(given) * total
        assert abs(sum(tokens) - ideal) <= max(lengths) * len(tokens)


def test_data_of_their_own_in_shares(on_ranks):
    def body(comm):
        return trained(comm, weights(comm.size), source=RankSource, epochs=1)

    results = on_ranks(body)
    ends = parts(SIZE, weights(len(results)))
    for rank, (taken, *_) in enumerate(results):
        assert len(taken[0]) == ends[rank + 1] - ends[rank]
        assert sorted(chain(*taken)) == [*range(N)]


@pytest.mark.parametrize(
    ("shares", "options", "message"),
    [
        (
            [1] * 9,
            {},
            r"shares from 0 samples on must be \d numbers, one for each rank that",
        ),
        (
            "measured",
            {"source": RankSource},
            "shares='measured' must be one number for each rank, if each rank has separate data",
        ),
        (
            "measured",
            {"algorithm": DataParallelASGD(servers=0, sync_steps=1)},
            "shares='measured' must be numbers, one for each rank that trains: the ranks of "
            "DataParallelASGD do not step together",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:servers=0")
def test_shares_that_do_not_fit(comm, shares, options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        trained(comm, shares, **options)


def test_a_session_deals_in_shares(on_ranks):
    """As its source does; a source of one's own has shares of its own."""

    def body(comm):
        given = weights(comm.size)
        (_, expected, _) = trained(comm, given)
        model = MLP([6, 5, 4], seed=0, dtype=np.float64)
        learner = Learner(model.parameters, MomentumSGD(lr=0.05), DataParallelSGD(), comm)
        session = TrainingSession(
            learner=learner,
            objective=model,
            train=Arrays(X, Y),
            minibatch_size=SIZE,
            epochs=2,
            shares=given,
        )
        session.run()
        assert same_bits(model.parameters.flat, expected)
        with pytest.raises(UserError, match=r"^shares=\{0: .* must not be given with a source"):
            TrainingSession(
                learner=learner, objective=model, train=Source(X, Y, SIZE), shares=given
            ).run()

    on_ranks(body)
