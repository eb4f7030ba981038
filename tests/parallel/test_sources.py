"""Sources on ranks: those that disagree, or of which one has bad data, all raise the same error."""

from __future__ import annotations

import re
from itertools import chain, islice

import numpy as np
import pytest
from few_weights import disagreement, errors_of, last, learner_of, named, numbered, put

from parallel_sgd import DataParallelSGD
from parallel_sgd.data import RankSource, Source


def train(minibatches, learner):
    """Take a step for every minibatch; the labels of each."""
    labels = []
    for x, y in minibatches:
        learner.step(put(learner, (x, y)))
        labels.append(y.tolist())
    return labels


def joined(lists):
    return list(chain.from_iterable(lists))


OPTIONS = [
    ("minibatch_size", 12, 13),
    ("epochs", 2, 3),
    ("seed", 0, 7),
    ("shuffle", True, False),
    ("start", 0, 1),
    ("classes", None, 40),
    ("dtype", "float32", "float64"),
    ("shares", None, {0: (1, 1, 1, 1)}),
]
every_option = pytest.mark.parametrize(("option", "usual", "other"), OPTIONS)


@every_option
@pytest.mark.parametrize("kind", [Source, RankSource])
def test_ranks_that_disagree_on_an_option(on_ranks, kind, option, usual, other):
    def body(comm):
        learner = learner_of(comm)
        learner.samples = 1 if option == "start" else 0
        given = {name: value for name, value, _ in OPTIONS}
        if last(comm) and comm.size > 1:
            given[option] = other
        if option == "start" and comm.size == 1:
            given["start"] = 1
        train(kind(*numbered(30), **given).minibatches(learner), learner)

    message, size = errors_of(on_ranks, body)
    assert message == disagreement(option, size, repr(usual), repr(other))


def test_ranks_that_disagree_on_the_number_of_samples(on_ranks):
    def body(comm):
        learner = learner_of(comm)
        source = Source(*numbered(29 if last(comm) else 30), 12)
        train(source.epoch(0, learner), learner)

    message, size = errors_of(on_ranks, body)
    assert message == disagreement("number of samples", size, 30, 29)


def test_ranks_can_find_out_that_they_disagree_before_they_train(on_ranks):
    def body(comm):
        Source(*numbered(30), seed=int(last(comm))).meet(learner_of(comm))

    message, size = errors_of(on_ranks, body)
    assert message == disagreement("seed", size, 0, 1)


def test_a_source_that_agreed_is_asked_again_by_another_learner(on_ranks):
    def body(comm):
        first, second = learner_of(comm), learner_of(comm)
        source = Source(*numbered(30), 12, epochs=2)
        train(source.minibatches(first), first)
        if last(comm) and comm.size > 1:
            source.seed = 1
        train(source.minibatches(first), first)  # is over, and has agreed
        train(source.minibatches(second), second)

    message, size = errors_of(on_ranks, body)
    assert message == disagreement("seed", size, 0, 1)


def test_all_ranks_together_take_every_sample_once_an_epoch(on_ranks):
    def body(comm):
        learner = learner_of(comm)
        source = Source(*numbered(30), 7, epochs=2)
        epochs = [train(source.epoch(number, learner), learner) for number in range(2)]
        return epochs, learner.samples

    results = on_ranks(body)
    for epoch in range(2):
        steps = zip(*(epochs[epoch] for epochs, _ in results), strict=True)
        minibatches = [joined(parts) for parts in steps]
        assert [len(minibatch) for minibatch in minibatches] == [7, 7, 7, 7, 2]
        assert sorted(joined(minibatches)) == list(range(30))
    assert all(samples == 60 for _, samples in results)


def test_a_source_that_threads_share(on_ranks):
    source = Source(*numbered(30), 7, epochs=2)

    def body(comm):
        learner = learner_of(comm)
        return train(source.minibatches(learner), learner)

    assert sorted(joined(joined(on_ranks(body)))) == sorted([*range(30)] * 2)


@pytest.mark.parametrize("bad", ["nan", "label", "item"])
@pytest.mark.parametrize(
    ("kind", "distributed_after"), [(Source, 0), (Source, 10**6), (RankSource, 0)]
)
def test_bad_data_on_one_rank(on_ranks, bad, kind, distributed_after):
    """In the second minibatch, as the last rank reads it, while the others wait in `step`."""

    def body(comm):
        learner = learner_of(comm, DataParallelSGD(distributed_after=distributed_after))
        x, y = numbered(24)
        if last(comm) and bad == "nan":
            x[12:] = np.nan
        if last(comm) and bad == "label":
            y[12:] = 99
        items = [*zip(x, y, strict=True)]
        if last(comm) and bad == "item":
            items[12:] = [None] * 12
        data = (items,) if bad == "item" else (x, y)
        size = 12 if kind is Source else 12 * comm.size
        source = kind(*data, minibatch_size=size, shuffle=False, classes=24)
        train(source.minibatches(learner), learner)

    message, size = errors_of(on_ranks, body)
    assert message.endswith(f"(on rank {size - 1})")
    what = {"nan": r"x\[.*\] = nan is not finite", "label": r"y\[.*\] = 99", "item": "item .* pair"}
    assert re.search(what[bad], message)


@pytest.mark.parametrize("distributed_after", [0, 10**6])
def test_bad_data_on_all_ranks(on_ranks, distributed_after):
    def body(comm):
        learner = learner_of(comm, DataParallelSGD(distributed_after=distributed_after))
        x, y = numbered(24)
        x[12:] = np.nan
        source = Source(x, y, 12, shuffle=False)
        train(source.minibatches(learner), learner)

    message, size = errors_of(on_ranks, body)
    if distributed_after:
        ranks = named(range(size))
        assert message == f"x[12][0] = nan is not finite: must be a finite number (on {ranks})"
    else:
        assert f"(on rank {size - 1})" in message and "x[12][0] = nan" in message


def test_a_learner_that_stands_before_the_start(on_ranks):
    def body(comm):
        learner = learner_of(comm)
        next(Source(*numbered(24), start=5).minibatches(learner))

    message, _ = errors_of(on_ranks, body)
    assert message.startswith("start=5 must be at most the 0 samples that the learner has seen (on")


def test_ranks_with_data_of_their_own_and_one_that_is_dry(on_ranks):
    """Rank k's samples are numbered from 100 k; the last rank of several has none."""

    def body(comm):
        count = 0 if last(comm) and comm.size > 1 else 9 + 4 * comm.rank
        total = sum(comm.allgather_object(count))
        learner = learner_of(comm)
        source = RankSource(*numbered(count, comm.rank), 12, epochs=2)
        epochs = [train(source.epoch(number, learner), learner) for number in range(2)]
        assert learner.samples == 2 * total
        for labels in epochs:
            assert sorted(joined(labels)) == list(range(100 * comm.rank, 100 * comm.rank + count))
        return [len(labels) for labels in epochs]

    steps = on_ranks(body)
    assert all(theirs == steps[0] for theirs in steps)


def test_ranks_with_data_of_their_own_go_on_where_they_stood(comm):
    def minibatches(learner):
        data = numbered(9 + 4 * comm.rank, comm.rank)
        return RankSource(*data, 12, epochs=2).minibatches(learner)

    learner, other = learner_of(comm), learner_of(comm)
    labels = train(minibatches(learner), learner)
    seen = train(islice(minibatches(other), 2), other)
    assert seen + train(minibatches(other), other) == labels
    assert other.samples == learner.samples
