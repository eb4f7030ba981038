"""Programs in which a rank does not what the others do: an error on all, where it was silent."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import chain, islice
from queue import Queue
from threading import Thread

import numpy as np
import pytest
from cases import zeros

import parallel_sgd as psgd
from parallel_sgd.data import RankSource, Source, with_next
from parallel_sgd.errors import SharedError, UserError
from parallel_sgd.training import Session
from parallel_sgd.training.expected import Expected, Feed
from parallel_sgd.training.in_common import EVERY, checksum

ALGORITHMS = {
    "data-parallel": psgd.DataParallelSGD(),
    "1 bit": psgd.DataParallelSGD(gradient_bits=1, overlap=True),
    "blocks": psgd.ModelAveragingSGD(sync_steps=2),
    "overlap": psgd.BlockMomentumSGD(sync_steps=2, overlap_samples=1000),
}
by_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def learner_of(comm, algorithm, samples=0):
    parameters = psgd.Parameters({"w": np.zeros(2, np.float32)})
    return psgd.Learner(parameters, psgd.SGD(lr=0.01), algorithm, comm)


def numbered(samples, rank=0):
    y = 100 * rank + np.arange(samples)
    return np.stack([y, -y], 1).astype(np.float32), y


def last(comm):
    return comm.rank == comm.size - 1


def put(learner, *minibatches):
    learner.gradient.flat[:] = sum(x.sum(axis=0) for x, _ in minibatches)
    return sum(len(x) for x, _ in minibatches)


def error_of(on_ranks, body):
    """The message that all ranks raise alike, and how many they are."""

    def caught(comm):
        with pytest.raises(UserError) as error:
            body(comm)
        return str(error.value), comm.size

    found = on_ranks(caught)
    assert len(set(found)) == 1
    assert found[0][1] == len(found)
    return found[0]


def ahead(minibatches):
    return (minibatch for minibatch, _ in with_next(minibatches))


@pytest.mark.parametrize("fetch", [list, ahead], ids=["list", "with_next"])
@pytest.mark.parametrize("name", ["data-parallel", "blocks"])
def test_minibatches_fetched_ahead_end_the_warm_start_where_they_begin(on_ranks, name, fetch):
    """Every sample is counted once, with the bits of minibatches that are fetched one by one."""
    algorithm = psgd.DataParallelSGD(distributed_after=60)
    if name == "blocks":
        algorithm = psgd.ModelAveragingSGD(distributed_after=60, sync_steps=3)

    def body(comm):
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

    on_ranks(body)


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
        if comm.size == 1 and how.startswith("left out"):
            raise UserError("alike on all ranks")

    message, size = error_of(on_ranks, body)
    if how == "other samples":
        assert message == (
            f"samples=3 must be the 4 of the minibatches that the source gave (on rank {size - 1})"
        )
    elif how == "twice" and prefetch is iter:
        assert re.search(
            rf"^samples=4 must be .* given none since .*\(on rank {size - 1}\)", message
        )
    elif size == 1 and how != "twice":
        assert message == "alike on all ranks"
    elif how == "left out":
        assert re.search(r"samples of the minibatches so far .*differs: ", message)
    elif how == "left out at last":
        assert re.search(r"(what the ranks do|samples that were trained on) .*differs: ", message)


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

    found = {
        "twice": "samples=4 must be those of a minibatch, but the source has given none since",
        "left out": "no step was taken with the last 4 samples that the source gave; learner.ex",
        "other samples": "samples=3 must be the 4 of the minibatches that the source gave; learner",
    }

    def caught(comm):
        with pytest.raises(UserError, match=rf"{found[how]}.*\(on rank 0\)$"):
            body(comm)

    on_ranks(caught)


def from_thread(minibatches, wait_s=0.0, first=0):
    """Minibatches that a thread of their own fetches ahead, all but so many of the first ones."""
    found = Queue(3)

    def fill():
        for minibatch in chain(minibatches, [None]):
            time.sleep(wait_s)
            found.put(minibatch)

    yield from islice(minibatches, first)
    thread = Thread(target=fill)
    thread.start()
    yield from iter(found.get, None)
    thread.join()


@pytest.mark.parametrize("first", [0, 2])
@by_algorithm
def test_minibatches_that_a_thread_fetches_ahead(on_ranks, name, first):
    """However far it is on each rank: nothing depends on it."""

    def body(comm):
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
        assert train(lambda found: from_thread(found, late, first)) == train(iter)

    on_ranks(body)


@by_algorithm
def test_a_rank_that_leaves_out_a_minibatch_of_a_thread(on_ranks, name):
    def body(comm):
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

    on_ranks(body)


@pytest.mark.parametrize("fetch", [iter, ahead], ids=["one by one", "with_next"])
@pytest.mark.parametrize("way", ["epochs", "one pass", "of a thread", "some of one pass"])
@by_algorithm
def test_what_all_ranks_leave_out_alike(on_ranks, name, way, fetch):
    """Gradients are added up, and what is left at the end of an epoch or of the whole dropped, or
    minibatches in the midst; the last one is short."""

    def body(comm):
        learner = learner_of(comm, ALGORITHMS[name])
        source = Source(*numbered(7 * 4 * comm.size + comm.size), 4 * comm.size, epochs=2)
        source.meet(learner)
        steps = 0
        passes = [source.epoch(n, learner) for n in range(2)]
        if way in ("one pass", "some of one pass"):
            passes = [source.minibatches(learner)]
        for minibatches in passes:
            held = []
            found = fetch(minibatches)
            for number, minibatch in enumerate(from_thread(found) if "thread" in way else found):
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

    on_ranks(body)


def test_a_source_that_is_left_in_the_midst_of_a_step_takes_nothing_of_it_along():
    """Python finds out at any time that nobody holds a generator any more."""
    local_step = psgd.SGD(lr=0.1).bind(zeros("one block"))
    expected = Expected(psgd.DataParallelSGD(), local_step)
    kept, left = (Feed(expected, psgd.DataParallelSGD(), pytest.fail) for _ in range(2))
    for feed in (kept, left):
        expected.begin(feed)
        expected.add(4, 8, feed)
        expected.ended(feed)
    assert (expected.clock, expected.given, expected.end) == (0, 16, 16)
    assert expected.take(4) == 8
    expected.forget(left)
    assert (expected.clock, expected.given, expected.end) == (0, 8, 8)
    local_step.state.samples = 8
    assert (expected.clock, expected.given, expected.end) == (0, 8, 8)
    expected.end_step()
    assert (expected.clock, expected.given, expected.end) == (8, 8, 8)
    for samples in (0, 3, 0, 0):  # nobody need have any
        expected.add(samples, samples)
    assert [expected.take(samples) for samples in (0, 3, 0, 0)] == [0, 3, 0, 0]


def test_what_workers_leave_out_is_told_how_to_leave_out(on_ranks):
    """They cannot be compared, so each has to say so."""

    def body(comm):
        learner = learner_of(comm, psgd.DataParallelASGD(sync_steps=1, servers=comm.size // 2))
        size = learner.comm.size
        source = Source(*numbered(5 * 4 * size), 4 * size)
        for epoch in range(0 if learner.serves else 2):
            pairs = zip(*[source.epoch(epoch, learner)] * 2, strict=False)
            for pair in pairs:
                learner.step(put(learner, *pair))
            learner.expect_nothing()
        learner.finish()

    on_ranks(body)


@pytest.mark.parametrize("compares", [True, False])
def test_a_step_meets_no_finish(on_ranks, compares):
    def body(comm):
        learner = learner_of(comm, psgd.DataParallelSGD())
        learner.in_common.compares = compares
        learner.step(4)
        if comm.size == 1:
            raise UserError("step of learner 0")
        if last(comm):
            learner.step(4)
        learner.finish()

    message, size = error_of(on_ranks, body)
    if size > 1:
        assert message.startswith("what the ranks do must be the same on all ranks, but differs: ")
        assert re.search(rf"rank {size - 1}: 'step of learner \d+'$", message)


def test_minibatches_from_both_sides_of_the_warm_starts_end_are_not_added_up(on_ranks):
    def body(comm):
        learner = learner_of(comm, psgd.DataParallelSGD(distributed_after=4))
        minibatches = Source(*numbered(16 * comm.size), 4 * comm.size).minibatches(learner)
        pair = next(minibatches), next(minibatches)
        message = "one step must not take minibatches from both sides of distributed_after"
        with pytest.raises(SharedError, match=message):
            learner.step(put(learner, *pair))

    on_ranks(body)


@pytest.mark.parametrize("kind", [Source, RankSource])
@by_algorithm
def test_legal_ways_with_minibatches(on_ranks, name, kind):
    """Added up, left early, anew, one source after another, and without any."""

    def body(comm):
        learner = learner_of(comm, ALGORITHMS[name])

        def source(**options):
            data = numbered(
                40 * comm.size if kind is Source else 40, comm.rank * (kind is not Source)
            )
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
        with pytest.raises(SharedError, match="must not be gone on with after another source has"):
            next(left)
        learner.expect_nothing()
        for _ in range(2):  # of none
            learner.step(4)
        learner.finish()

    on_ranks(body)


@pytest.mark.parametrize("gradient_bits", [1, 32])
def test_ranks_without_samples_add_up_as_many_minibatches_as_others(on_ranks, gradient_bits):
    def body(comm):
        learner = learner_of(comm, psgd.DataParallelSGD(gradient_bits=gradient_bits))
        count = 0 if comm.size > 1 and last(comm) else 40
        source = RankSource(*numbered(count, comm.rank), 4 * comm.size)
        for pair in zip(*[source.minibatches(learner)] * 2, strict=True):
            put(learner, *pair)
            learner.step(sum(len(x) for x, _ in pair))
        learner.finish()
        assert learner.samples == sum(comm.allgather_object(count))

    on_ranks(body)


def test_an_epoch_that_waits_for_its_steps_is_not_given_again(on_ranks):
    def body(comm):
        learner = learner_of(comm, psgd.DataParallelSGD())
        source = Source(*numbered(8 * comm.size), 4 * comm.size)
        list(source.epoch(0, learner))
        for again in (source.epoch(0, learner), source.minibatches(learner)):
            with pytest.raises(
                SharedError, match=r"^epoch 0 has been given already, and \d+ samples"
            ):
                next(again)
            list(source.epoch(0, learner))

    on_ranks(body)


@pytest.mark.parametrize("call", ["step", "meet", "finish"])
@by_algorithm
def test_two_learners_called_in_crossed_order(on_ranks, name, call):
    def body(comm):
        pair = [learner_of(comm, ALGORITHMS[name]) for _ in range(2)]
        if last(comm) and comm.size > 1:
            pair.reverse()
        for learner in pair * 2:
            learner.gradient.flat[:] = 1
            if call == "step":
                learner.step(2)
            else:
                getattr(learner, call)()
        if comm.size == 1:
            raise UserError(f"{call} of learner 0")

    message, size = error_of(on_ranks, body)
    if size > 1:
        assert message.startswith("what the ranks do must be the same on all ranks, but differs: ")
        assert re.search(rf"rank {size - 1}: '{call} of learner \d+'$", message)


class Augmented:
    """Items whose x is another one at every reading."""

    def __init__(self, rank, labels):
        self.random, self.labels = np.random.default_rng(rank), labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.random.standard_normal(2), self.labels[index]


@pytest.mark.parametrize("what", ["x", "y", "labels of items"])
def test_ranks_that_read_different_data_of_one_shape(on_ranks, what):
    def body(comm):
        learner = learner_of(comm, psgd.DataParallelSGD())
        x, y = numbered(400)
        other = last(comm) and comm.size > 1
        if what == "x":
            x[1::2] += other
        else:
            y = y[::-1] if other else y
        data = (Augmented(comm.rank, y), None) if what == "labels of items" else (x, y)
        Source(*data, 4 * comm.size).meet(learner)
        if comm.size == 1:
            raise UserError("data")

    message, size = error_of(on_ranks, body)
    if size > 1:
        assert message.startswith("data must be the same on all ranks, but differs: rank")


def test_items_that_are_augmented_at_random_are_the_same_data(on_ranks):
    def body(comm):
        learner = learner_of(comm, psgd.DataParallelSGD())
        source = Source(Augmented(comm.rank, np.arange(20)), minibatch_size=4)
        assert len(list(source.minibatches(learner))) == 5

    on_ranks(body)


class Windows:
    """Items whose x and y are others at every reading: some, or all."""

    def __init__(self, rank, often):
        self.random, self.often = np.random.default_rng(rank), often

    def __len__(self):
        return 40

    def __getitem__(self, index):
        at = self.random.integers(4, 100) if self.random.random() < self.often else index
        return np.arange(at, at + 4), at % 4


@pytest.mark.parametrize("often", [0.5, 1.0])
def test_labels_that_are_drawn_anew_are_no_other_data(on_ranks, often):
    def body(comm):
        for number in range(5):
            learner = learner_of(comm, psgd.DataParallelSGD())
            source = Source(Windows(100 * number + comm.rank, often), minibatch_size=4 * comm.size)
            for x, _ in source.minibatches(learner):
                learner.step(len(x))
            learner.finish()

    on_ranks(body)


def test_a_session_over_windows_is_resumed(on_ranks, tmp_path):
    def body(comm):
        folder = comm.allgather_object(tmp_path)[0]
        for epochs in (1, 2):
            model = psgd.models.SoftmaxRegression(4, 4)
            rows = Session(
                model=model,
                train=psgd.data.as_dataset(Windows(comm.rank + epochs, 1.0)),
                test=psgd.data.Arrays(np.eye(4, dtype=np.float32), np.arange(4)),
                optimizer=psgd.SGD(lr=0.001),
                algorithm=psgd.DataParallelSGD(),
                comm=comm,
                minibatch_size=4 * comm.size,
                epochs=epochs,
                seed=0,
                checkpoints=folder,
                checkpoint_every=20,
                resume=folder if epochs > 1 else None,
            ).run()
            assert len(rows) == epochs

    on_ranks(body)


def test_sessions_compare_test_data(on_ranks):
    def body(comm):
        x, y = np.eye(4, dtype=np.float32), np.arange(4)
        test = psgd.data.Arrays(x, y[::-1] if last(comm) and comm.size > 1 else y)
        model = psgd.models.SoftmaxRegression(4, 4)
        Session(
            model=model,
            train=psgd.data.Arrays(x, y),
            test=test,
            optimizer=psgd.SGD(lr=0.1),
            algorithm=psgd.DataParallelSGD(),
            comm=comm,
            minibatch_size=4,
            epochs=1,
            seed=0,
        ).run()
        if comm.size == 1:
            raise UserError("test data")

    message, size = error_of(on_ranks, body)
    if size > 1:
        assert message.startswith("test data must be the same on all ranks, but differs: rank")


@pytest.mark.parametrize("found", ["step", "meet", "finish", "save"])
@by_algorithm
def test_models_that_have_drifted_apart(on_ranks, tmp_path, name, found):
    """What all have in common: in blocks, where they began."""
    algorithm = ALGORITHMS[name]

    def body(comm):
        learner = learner_of(comm, algorithm)

        def step():
            learner.gradient.flat[:] = 1
            learner.step(2)

        for _ in range(4):
            step()
        model = learner.algorithm.shared_model(learner.state, learner.parameters)
        if last(comm) and comm.size > 1:
            model[0] += 1
        if found == "step":
            for _ in range(EVERY + 2):
                step()
        elif found == "save":
            psgd.Checkpoints(comm.allgather_object(tmp_path)[0]).save(learner)
        else:
            getattr(learner, found)()
        if comm.size == 1:
            raise UserError("the model's checksum")

    message, size = error_of(on_ranks, body)
    if size > 1:
        others = "rank 0" if size == 2 else "ranks " + ", ".join(map(str, range(size - 1)))
        assert re.match(
            rf"the model's checksum must be the same on all ranks, but differs: {others}: '\w+'; "
            rf"rank {size - 1}: '\w+'$",
            message,
        )


@pytest.mark.parametrize("how", ["drift", "fail"])
@by_algorithm
def test_going_back_to_a_checkpoint_after_an_error(on_ranks, tmp_path, name, how):
    """Ranks that differ need not be alike for that, and are afterwards."""

    def body(comm):
        learner = learner_of(comm, ALGORITHMS[name])

        def train(steps):
            for _ in range(steps):
                learner.gradient.flat[:] = 1
                learner.expect(2, 2 * comm.size)
                learner.step(2)

        def go_wrong():
            train(1)
            if how == "fail" and comm.rank == 0:
                learner.fail("bad")
            learner.algorithm.shared_model(learner.state, learner.parameters)[1] += comm.rank
            train(EVERY + 2)

        train(4)
        folder = comm.allgather_object(tmp_path)[0]
        with psgd.Checkpoints(folder) as checkpoints:
            checkpoints.save(learner)
        alike = learner.parameters.flat.copy()
        if how == "fail" or comm.size > 1:
            with pytest.raises(SharedError):
                go_wrong()
        psgd.load_checkpoint(learner, folder)
        assert np.array_equal(learner.parameters.flat, alike)
        train(2 * EVERY + 1)
        learner.finish()

    on_ranks(body)


def test_loading_on_one_rank_alone(on_ranks, tmp_path):
    def body(comm):
        learner = learner_of(comm, psgd.DataParallelSGD())
        if last(comm):
            psgd.load_checkpoint(learner, tmp_path)
        else:
            learner.step(2)

    message, size = error_of(on_ranks, body)  # of one rank, that there is no checkpoint
    if size > 1:
        assert re.search(r"what the ranks do .*'load_checkpoint of learner \d+'$", message)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 7, 8])
def test_a_checksum_sees_every_bit(dtype, size):
    x = np.linspace(-1, 1, size).astype(dtype)
    before = checksum(x)
    for bit in range(8 * x.nbytes):
        x.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        assert checksum(x) != before
        x.view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assert checksum(x) == before


@pytest.mark.parametrize("overlap", [0, 1000])
@pytest.mark.parametrize("where", ["step", "finish", "other"])
def test_after_an_error_the_model_is_that_of_the_blocks_beginning(on_ranks, overlap, where):
    """Where a rank was about to synchronize, also with overlap and where another has failed."""

    def body(comm):
        algorithm = psgd.BlockMomentumSGD(sync_steps=2, overlap_samples=overlap)
        learner = learner_of(comm, algorithm)
        fails = where == "other" and comm.rank == 0
        end = (lambda: learner.fail("bad")) if fails else lambda: learner.step(2)
        for step in range(5 if where == "finish" else 6):
            learner.gradient.flat[:] = np.nan if step == 4 else 1 + comm.rank
            learner.expect(2, 2 * comm.size)
            if step < 5:
                learner.step(2)
        with pytest.raises(SharedError):
            learner.finish() if where == "finish" else end()
        if not fails:
            assert np.isfinite(learner.parameters.flat).all()
            assert np.array_equal(learner.parameters.flat, learner.state.start)

    on_ranks(body)


def test_an_optimizers_state_is_reset_to_what_it_was_at_first(on_ranks):
    def body(comm):
        optimizer = psgd.Adagrad(lr=0.1, initial_accumulator=0.5)
        parameters = zeros("one block")
        algorithm = psgd.BlockMomentumSGD(sync_steps=3)
        learner = psgd.Learner(parameters, optimizer, algorithm, comm)
        (s,) = learner.local_step.state.buffers.values()
        for step in range(6):
            learner.gradient.flat[:] = 1
            learner.step(2)
            assert (s == 0.5).all() == (step % 3 == 2)
        assert learner.local_step.state.samples == 12 * comm.size

    on_ranks(body)


def test_bytes_are_counted_once_when_bits_change_and_inner_states_are_averaged(on_ranks):
    def body(comm):
        def sent(bits):
            algorithm = psgd.ModelAveragingSGD(
                sync_steps=1, gradient_bits=bits, inner_state="average", block_size=64
            )
            learner = psgd.Learner(zeros("one block"), psgd.MomentumSGD(lr=0.1), algorithm, comm)
            for _ in range(3):
                learner.gradient.flat[:] = 1
                learner.step(1)
            learner.finish()
            return learner.bytes_sent

        later = 2 * comm.size  # the clock in the third block's end
        assert 3 * sent({0: 32, later + 1: 16}) == 2 * sent({0: 32, 10**9: 16}) + sent(16)

    on_ranks(body)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"parameters": {"w": np.zeros(3)}}, "parameters must be an instance of Parameters, such"),
        (
            {"optimizer": psgd.SGD},
            "optimizer must be an instance of Optimizer.* the class SGD( |$)",
        ),
        (
            {"algorithm": psgd.SGD(lr=1)},
            r"algorithm must be an instance of Algorithm, .* it is a .*\.SGD",
        ),
        ({"algorithm": psgd.DataParallelSGD}, "algorithm must .* the class DataParallelSGD( |$)"),
        ({"sync_perf_stats": "often"}, "sync_perf_stats='often' must be a whole number"),
    ],
)
def test_arguments_of_another_kind_are_refused_on_all_ranks(on_ranks, wrong, message, alone):
    def body(comm):
        given = {
            "parameters": zeros("one block"),
            "optimizer": psgd.SGD(lr=0.1),
            "algorithm": psgd.DataParallelSGD(),
        }
        psgd.Learner(**{**given, **(wrong if not alone or comm.rank == 0 else {})}, comm=comm)

    found, size = error_of(on_ranks, body)
    assert re.match(message, found)
    assert found.endswith("(on rank 0)") == (alone or size == 1)


def test_a_communicator_of_mpi4py_is_none():
    with pytest.raises(
        UserError, match=r"comm must be an instance of Communicator, such as .* it is a object"
    ):
        psgd.Learner(zeros("one block"), psgd.SGD(lr=1), psgd.DataParallelSGD(), object())


def test_blocks_in_which_a_rank_can_have_no_sample_are_refused(on_ranks):
    def body(comm):
        algorithm = psgd.BlockMomentumSGD(block_samples=max(comm.size - 1, 1))
        learner_of(comm, algorithm)
        if comm.size == 1:
            raise UserError("block_samples")

    message, size = error_of(on_ranks, body)
    if size > 1:
        assert message.startswith(
            f"block_samples={size - 1} must be at least the number of ranks, {size}: "
        )
