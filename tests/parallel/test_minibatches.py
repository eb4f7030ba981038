"""Which minibatches a step takes: one for each that a source gave, as all other ranks do."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import chain, islice
from queue import Queue
from threading import Thread

import pytest
from cases import zeros
from few_weights import ALGORITHMS, by_algorithm, errors_of, last, learner_of, numbered, put

import parallel_sgd as psgd
from parallel_sgd.data import RankSource, Source, with_next
from parallel_sgd.errors import SharedError, UserError
from parallel_sgd.training import Feed, NoRecovery
from parallel_sgd.training.minibatch_ledger import MinibatchLedger


def ahead(minibatches):
    return (minibatch for minibatch, _ in with_next(minibatches))


@pytest.mark.parametrize("fetch", [list, ahead], ids=["list", "with_next"])
@pytest.mark.parametrize("name", ["data-parallel", "blocks"])
def test_minibatches_fetched_ahead_end_the_warm_start_where_they_begin(comm, name, fetch):
    """Every sample is counted once, with the bits of minibatches that are fetched one by one."""
    algorithm = psgd.DataParallelSGD(distributed_after=60)
    if name == "blocks":
        algorithm = psgd.ModelAveragingSGD(distributed_after=60, sync_steps=3)

    def train(fetch):
        learner = learner_of(comm, algorithm)
        source = Source(*numbered(90), 12, epochs=2)
        labels = []
        epochs = chain.from_iterable(source.epoch(n, learner) for n in range(2))
        for x, y in fetch(epochs):
            warm = learner.samples < 60
            assert learner.step(put(learner, (x, y))) <= 12
            labels += y.tolist() if comm.rank == 0 or not warm else []
        learner.finish()
        assert learner.samples == 180
        return labels, learner.parameters.flat.tobytes()

    one_by_one, fetched = train(iter), train(fetch)
    assert fetched == one_by_one
    everywhere = chain.from_iterable(comm.allgather_object(fetched[0]))
    assert sorted(everywhere) == sorted([*range(90)] * 2)


@pytest.mark.parametrize("prefetch", [iter, ahead], ids=["one by one", "with_next"])
@by_algorithm
@pytest.mark.parametrize("how", ["twice", "left out", "left out at last", "other samples"])
def test_a_rank_that_does_not_step_once_for_each_minibatch(on_ranks, name, how, prefetch):
    """It is noticed before anything is trained on that the ranks do not have in common."""

    def body(comm):
        learner = learner_of(comm, ALGORITHMS[name])
        source = Source(*numbered(7 * 4 * comm.size), 4 * comm.size)
        for step, minibatch in enumerate(prefetch(source.minibatches(learner))):
            wrong = last(comm) and step == (6 if how == "left out at last" else 1)
            samples = put(learner, minibatch)
            if wrong and how.startswith("left out"):
                continue
            learner.step(samples - (wrong and how == "other samples"))
            if wrong and how == "twice":
                put(learner, minibatch)
                learner.step(samples)
        learner.finish()

    message, size = errors_of(on_ranks, body)
    if how == "other samples":
        assert message == (
            "samples=3 must be 4, as in the minibatches that the source issued (on rank "
            f"{size - 1})"
        )
    elif how == "twice" and prefetch is iter:
        assert re.search(
            rf"^samples=4 must be .* issued no minibatch since .*\(on rank {size - 1}\)", message
        )
    elif size == 1 and how != "twice":
        assert message is None  # alike on all ranks
    elif how == "left out":
        assert re.search(r"samples issued so far .*differs: ", message)
    elif how == "left out at last":
        assert re.search(r"(call of the ranks|samples trained on) .*differs: ", message)


@pytest.mark.parametrize("how", ["twice", "left out", "other samples"])
def test_an_asynchronous_worker_that_does_not_step_once_for_each(on_ranks, how):
    def body(comm):
        algorithm = psgd.DataParallelASGD(sync_steps=1, servers=comm.size // 2)
        learner = learner_of(comm, algorithm)
        size = learner.comm.size
        source = Source(*numbered(5 * 4 * size), 4 * size)
        for step, minibatch in enumerate(source.minibatches(learner)):
            samples, wrong = put(learner, minibatch), learner.comm.rank == 0 and step == 2
            if wrong and how == "left out":
                continue
            learner.step(samples - (wrong and how == "other samples"))
            if wrong and how == "twice":
                learner.step(samples)
        learner.finish()

    messages = {
        "twice": "samples=4 must be the samples of a minibatch, but the source has issued no",
        "left out": "no step was taken with the last 4 samples that the source issued; learner",
        "other samples": "samples=3 must be 4, as in the minibatches that the source issued; "
        "learner",
    }

    def caught(comm):
        with pytest.raises(UserError, match=rf"{messages[how]}.*\(on rank 0\)$"):
            body(comm)

    on_ranks(caught)


def from_thread(minibatches, wait_s=0.0, first=0):
    """Minibatches that a thread of their own fetches ahead, all but so many of the first ones."""
    fetched = Queue(3)

    def fill():
        for minibatch in chain(minibatches, [None]):
            time.sleep(wait_s)
            fetched.put(minibatch)

    yield from islice(minibatches, first)
    thread = Thread(target=fill)
    thread.start()
    yield from iter(fetched.get, None)
    thread.join()


@pytest.mark.parametrize("first", [0, 2])
@by_algorithm
def test_minibatches_that_a_thread_fetches_ahead(comm, name, first):
    """However far it is on each rank: nothing depends on it."""
    algorithm = replace(ALGORITHMS[name], distributed_after=20)

    def train(fetch):
        learner = learner_of(comm, algorithm)
        source = Source(*numbered(14 * comm.size), 4 * comm.size, epochs=2)
        source.meet(learner)
        for minibatch in fetch(source.minibatches(learner)):
            learner.step(put(learner, minibatch))
        learner.finish()
        assert learner.samples == 28 * comm.size
        return learner.parameters.flat.tobytes()

    late = 0.002 * comm.rank
    assert train(lambda minibatches: from_thread(minibatches, late, first)) == train(iter)


@by_algorithm
def test_a_rank_that_leaves_out_a_minibatch_of_a_thread(comm, name):
    learner = learner_of(comm, ALGORITHMS[name])
    source = Source(*numbered(7 * 4 * comm.size), 4 * comm.size)
    source.meet(learner)
    try:
        for step, minibatch in enumerate(from_thread(source.minibatches(learner))):
            if not (last(comm) and step == 1):
                learner.step(put(learner, minibatch))
        learner.finish()
    except SharedError:
        assert comm.size > 1
    else:
        assert comm.size == 1


@pytest.mark.parametrize("fetch", [iter, ahead], ids=["one by one", "with_next"])
@pytest.mark.parametrize("way", ["epochs", "one pass", "of a thread", "some of one pass"])
@by_algorithm
def test_what_all_ranks_leave_out_alike(comm, name, way, fetch):
    """Gradients are added up, and what is left at the end of an epoch or of the whole dropped, or
    minibatches in the midst; the last one is short."""
    learner = learner_of(comm, ALGORITHMS[name])
    source = Source(*numbered(7 * 4 * comm.size + comm.size), 4 * comm.size, epochs=2)
    source.meet(learner)
    steps = 0
    passes = [source.epoch(n, learner) for n in range(2)]
    if way in ("one pass", "some of one pass"):
        passes = [source.minibatches(learner)]
    for minibatches in passes:
        held = []
        fetched = fetch(minibatches)
        for number, minibatch in enumerate(from_thread(fetched) if "thread" in way else fetched):
            held.append(minibatch)
            if "some" in way:
                if number not in (2, 4, 5):
                    learner.step(put(learner, minibatch))
            elif len(held) == 3:
                assert learner.step(put(learner, *held)) <= 12 * comm.size
                steps, held = steps + 1, []
    learner.finish()
    assert steps == {"epochs": 4, "of a thread": 4, "one pass": 5}.get(way, 0)
    assert len(set(comm.allgather_object(learner.samples))) == 1


def test_a_source_that_is_left_in_the_midst_of_a_step_takes_nothing_of_it_along():
    """Python finds out at any time that nobody holds a generator any more."""
    local_step = psgd.SGD(lr=0.1).bind(zeros("one block"))
    announced = MinibatchLedger(psgd.DataParallelSGD(), local_step)
    kept, left = (
        Feed(announced, psgd.DataParallelSGD(), None, pytest.fail, NoRecovery()) for _ in range(2)
    )
    for feed in (kept, left):
        announced.begin(feed)
        announced.add(4, 8, feed)
        announced.ended(feed)
    assert (announced.clock, announced.issued, announced.end) == (0, 16, 16)
    assert announced.take(4) == 8
    announced.abandon(left)
    assert (announced.clock, announced.issued, announced.end) == (0, 8, 8)
    local_step.state.samples = 8
    assert (announced.clock, announced.issued, announced.end) == (0, 8, 8)
    announced.end_step()
    assert (announced.clock, announced.issued, announced.end) == (8, 8, 8)
    for samples in (0, 3, 0, 0):  # nobody need have any
        announced.add(samples, samples)
    assert [announced.take(samples) for samples in (0, 3, 0, 0)] == [0, 3, 0, 0]


def test_what_workers_leave_out_is_told_how_to_leave_out(comm):
    """They cannot be compared, so each has to say so."""
    learner = learner_of(comm, psgd.DataParallelASGD(sync_steps=1, servers=comm.size // 2))
    size = learner.comm.size
    source = Source(*numbered(5 * 4 * size), 4 * size)
    for epoch in range(0 if learner.serves else 2):
        pairs = zip(*[source.epoch(epoch, learner)] * 2, strict=False)
        for pair in pairs:
            learner.step(put(learner, *pair))
        learner.discard_issued()
    learner.finish()


@pytest.mark.parametrize("compares", [True, False])
def test_a_step_meets_no_finish(on_ranks, compares):
    def body(comm):
        learner = learner_of(comm)
        learner.consistency.compares = compares
        learner.step(4)
        if last(comm):
            learner.step(4)
        learner.finish()

    message, size = errors_of(on_ranks, body)
    if size > 1:
        assert message.startswith("call of the ranks must be the same on all ranks, but differs: ")
        assert re.search(rf"rank {size - 1}: 'step of learner \d+'$", message)


def test_minibatches_from_both_sides_of_the_warm_starts_end_are_not_added_up(comm):
    learner = learner_of(comm, psgd.DataParallelSGD(distributed_after=4))
    minibatches = Source(*numbered(16 * comm.size), 4 * comm.size).minibatches(learner)
    pair = next(minibatches), next(minibatches)
    message = "minibatches of a step must all begin before distributed_after="
    with pytest.raises(SharedError, match=message):
        learner.step(put(learner, *pair))


@pytest.mark.parametrize("kind", [Source, RankSource])
@by_algorithm
def test_legal_ways_with_minibatches(comm, name, kind):
    """Added up, left early, anew, one source after another, and without any."""
    learner = learner_of(comm, ALGORITHMS[name])

    def source(**options):
        data = numbered(40 * comm.size if kind is Source else 40, comm.rank * (kind is not Source))
        return kind(*data, 4 * comm.size, **options)

    for pair in zip(*[source(epochs=2).minibatches(learner)] * 2, strict=True):
        assert learner.step(put(learner, *pair)) == 8 * comm.size
    start = learner.samples
    left = source(start=start).minibatches(learner)
    for minibatch, _ in zip(left, range(3), strict=False):  # fetches a fourth
        learner.step(put(learner, minibatch))
    for minibatch in source(start=start).minibatches(learner):
        learner.step(put(learner, minibatch))
    assert learner.samples == start + 40 * comm.size
    with pytest.raises(SharedError, match="must not be continued after another source has"):
        next(left)
    learner.discard_issued()
    for _ in range(2):  # of none
        learner.step(4)
    learner.finish()


@pytest.mark.parametrize("gradient_bits", [1, 32])
def test_ranks_without_samples_add_up_as_many_minibatches_as_others(comm, gradient_bits):
    learner = learner_of(comm, psgd.DataParallelSGD(gradient_bits=gradient_bits))
    count = 0 if comm.size > 1 and last(comm) else 40
    source = RankSource(*numbered(count, comm.rank), 4 * comm.size)
    for pair in zip(*[source.minibatches(learner)] * 2, strict=True):
        put(learner, *pair)
        learner.step(sum(len(x) for x, _ in pair))
    learner.finish()
    assert learner.samples == sum(comm.allgather_object(count))


def test_an_epoch_that_waits_for_its_steps_is_not_given_again(comm):
    learner = learner_of(comm)
    source = Source(*numbered(8 * comm.size), 4 * comm.size)
    list(source.epoch(0, learner))
    for again in (source.epoch(0, learner), source.minibatches(learner)):
        with pytest.raises(
            SharedError, match=r"^epoch 0 has been issued already, and \d+ of its samples"
        ):
            next(again)
        list(source.epoch(0, learner))
