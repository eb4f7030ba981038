"""Data sets and sources: K ranks are K fake learners, stepped in turn."""

from __future__ import annotations

import sys
import weakref
from itertools import chain

import numpy as np
import pytest
from fake_learners import Comm, Learner, numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_sgd import data
from parallel_sgd.data import Arrays, Items, RankSource, Source, count_classes, flattened, tasks
from parallel_sgd.data.examples import bundled
from parallel_sgd.errors import UserError

repeatable = settings(deadline=None, derandomize=True, database=None)


def ranks(size, samples=0, distributed=True):
    return [Learner(Comm(rank, size), distributed, samples) for rank in range(size)]


def deal(iterators, learners):
    """Step all ranks together; for each minibatch, the list of the labels each rank got."""
    dealt = []
    while True:
        parts = [next(it, None) for it in iterators]
        if any(part is None for part in parts):
            assert all(part is None for part in parts), "the ranks took different numbers of steps"
            return dealt
        for x, y in parts:
            assert x.dtype == np.float32 and y.dtype == np.int64
            assert x.shape == (len(y), 2) and (x[:, 0] == y).all()
        labels = [part[1].tolist() for part in parts]
        dealt.append(labels)
        count = sum(map(len, labels)) if learners[0].distributed else len(labels[0])
        for learner, own in zip(learners, labels, strict=True):
            assert learner.expected == (len(own), count)
            learner.samples += count


def run(samples, size, minibatch_size, position=0, **options):
    """Labels by minibatch and rank."""
    learners = ranks(size, position)
    source = Source(*numbered(samples), minibatch_size, **options)
    return deal([source.minibatches(learner) for learner in learners], learners)


def flat(lists):
    return list(chain.from_iterable(lists))


def joined(dealt):
    return [flat(parts) for parts in dealt]


shapes = {
    "samples": st.integers(1, 40),
    "size": st.integers(1, 7),
    "minibatch_size": st.integers(1, 45),
}


@repeatable
@given(**shapes, epochs=st.integers(1, 3), seed=st.integers(0, 3))
def test_every_sample_once_an_epoch_and_the_serial_minibatches(
    samples, size, minibatch_size, epochs, seed
):
    dealt = run(samples, size, minibatch_size, epochs=epochs, seed=seed)
    assert joined(dealt) == joined(run(samples, 1, minibatch_size, epochs=epochs, seed=seed))
    steps = -(-samples // minibatch_size)
    assert len(dealt) == epochs * steps
    for epoch in range(epochs):
        labels = flat(joined(dealt[epoch * steps : (epoch + 1) * steps]))
        assert sorted(labels) == list(range(samples))
    for parts in dealt:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_the_order_is_seeded_and_differs_by_epoch():
    def epochs(seed):
        return joined(run(50, 1, 50, epochs=2, seed=seed))

    first, second = epochs(0)
    assert first != second and sorted(first) == sorted(second)
    assert epochs(0) == [first, second]
    assert epochs(1)[0] not in (first, second)
    assert joined(run(5, 1, 2, epochs=2, shuffle=False)) == [[0, 1], [2, 3], [4]] * 2


@repeatable
@given(**shapes, epochs=st.integers(1, 3), stop=st.integers(0, 200))
def test_a_new_source_goes_on_where_the_learner_stands(samples, size, minibatch_size, epochs, stop):
    whole = run(samples, size, minibatch_size, epochs=epochs)
    stop = min(stop, len(whole))
    seen = sum(map(len, joined(whole[:stop])))
    assert run(samples, size, minibatch_size, epochs=epochs, position=seen) == whole[stop:]
    later = run(samples, size, minibatch_size, epochs=epochs, position=seen + 7, start=7)
    assert later == whole[stop:]


def test_epochs_one_by_one_are_the_same_run():
    source = Source(*numbered(10), 4, epochs=3)
    learners = ranks(2)
    single = [deal([source.epoch(e, r) for r in learners], learners) for e in range(3)]
    assert flat(single) == run(10, 2, 4, epochs=3)
    assert deal([source.epoch(2, r) for r in learners], learners) == []
    assert source.samples_per_epoch == 10


def test_the_warm_start_gives_every_rank_the_whole_minibatch():
    learners = ranks(3, distributed=False)
    source = Source(*numbered(10), 4)
    iterators = [source.minibatches(learner) for learner in learners]
    parts = [next(iterator)[1].tolist() for iterator in iterators]
    serial = joined(run(10, 1, 4))
    assert parts == [serial[0]] * 3
    for learner in learners:
        learner.distributed, learner.samples = True, 4
    assert joined(deal(iterators, learners)) == serial[1:]


def test_ranks_agree_once_for_each_learner_and_communicator():
    source = Source(*numbered(10), 4, epochs=3)
    learner, other = Learner(), Learner()
    for number in range(3):
        list(source.epoch(number, learner))
    list(source.minibatches(learner))
    facts = {"minibatch_size": 4, "epochs": 3, "seed": 0, "shuffle": True, "start": 0}
    facts |= {"classes": None, "dtype": "float32", "shares": None, "number of samples": 10}
    assert learner.comm.agreed == [facts]
    list(source.minibatches(other))
    assert len(other.comm.agreed) == 1
    learner.comm = Comm()
    list(source.minibatches(learner))
    assert len(learner.comm.agreed) == 1
    list(Source(*numbered(10), 4).minibatches(learner))
    assert len(learner.comm.agreed) == 2
    own = RankSource(*numbered(10), 4, dtype=None)
    next(own.minibatches(learner))
    assert "number of samples" not in learner.comm.agreed[2]
    assert learner.comm.agreed[2]["dtype"] is None


def test_a_source_keeps_no_learner_alive():
    source = Source(*numbered(10), 4)
    learner = Learner()
    seen = weakref.ref(learner)
    list(source.minibatches(learner))
    del learner
    assert seen() is None


def private(lengths, minibatch_size, samples=0, **options):
    """Rank k's labels are 100 k and up."""
    learners = ranks(len(lengths), samples)
    sources = []
    for rank, n in enumerate(lengths):
        y = 100 * rank + np.arange(n)
        x = np.stack([y, y], 1).astype(float)
        sources.append(RankSource(x, y, minibatch_size, **options))
        learners[rank].comm.lengths = lengths
    pairs = zip(sources, learners, strict=True)
    return deal([source.minibatches(learner) for source, learner in pairs], learners)


@repeatable
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    minibatch_size=st.integers(5, 17),
    epochs=st.integers(1, 3),
    stop=st.integers(0, 100),
)
def test_ranks_with_their_own_data_run_dry_and_finish(lengths, minibatch_size, epochs, stop):
    dealt = private(lengths, minibatch_size, epochs=epochs)
    shares = [len(range(rank, minibatch_size, len(lengths))) for rank in range(len(lengths))]
    steps = max(-(-n // m) for n, m in zip(lengths, shares, strict=True))
    assert len(dealt) == epochs * steps
    own = sorted(100 * rank + i for rank, n in enumerate(lengths) for i in range(n))
    for epoch in range(epochs):
        parts = dealt[epoch * steps : (epoch + 1) * steps]
        assert sorted(flat(joined(parts))) == own
        for step, minibatch in enumerate(parts):
            assert [len(part) for part in minibatch] == [
                min(max(n - step * m, 0), m) for n, m in zip(lengths, shares, strict=True)
            ]

    stop = min(stop, len(dealt))
    seen = sum(map(len, joined(dealt[:stop])))
    assert private(lengths, minibatch_size, seen, epochs=epochs) == dealt[stop:]


def test_ranks_with_their_own_data_shuffle_each_epoch():
    first, second = np.split(np.array(private([20, 3], 6, epochs=2), dtype=object), 2)
    assert [p.tolist() for p in first] != [p.tolist() for p in second]


def rank_source(learner, *options, **named):
    return list(RankSource(*numbered(5), *options, **named).minibatches(learner))


def test_ranks_with_their_own_data_refuse_what_cannot_work():
    two = Learner(Comm(0, 2))
    for message, learner, options in [
        (
            "minibatch_size=1 must be one number, at least the number of ranks, 2",
            two,
            {"minibatch_size": 1},
        ),
        ("distributed_after must be 0", Learner(distributed=False), {}),
        ("run without --survive", Learner(Comm(0, 2, fault_tolerant=True)), {}),
        (
            r"minibatch_size=64: no minibatch of these ranks begins after 3 samples",
            Learner(samples=3),
            {},
        ),
    ]:
        with pytest.raises(UserError, match=message):
            rank_source(learner, **options)


class Recorded:
    """Items that remember which were read."""

    def __init__(self, samples):
        self.x, self.y = numbered(samples)
        self.read = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read.append(index)
        return self.x[index], int(self.y[index])


def test_items_are_read_only_by_the_rank_they_belong_to():
    items = [Recorded(23) for _ in range(3)]
    learners = ranks(3)
    sources = [Source(own, minibatch_size=6) for own in items]
    pairs = zip(sources, learners, strict=True)
    dealt = deal([source.minibatches(learner) for source, learner in pairs], learners)
    assert dealt == run(23, 3, 6)
    compared = np.linspace(0, 22, 8).astype(int).tolist()  # their labels, twice, among the ranks
    for rank, own in enumerate(items):
        assert own.read == 2 * compared + flat(parts[rank] for parts in dealt)


def test_an_empty_part_of_items_has_the_samples_shape():
    x, y = next(Source(Recorded(1), minibatch_size=9).minibatches(Learner(Comm(1, 2))))
    assert x.shape == (0, 2) and y.shape == (0,)


def test_a_split_is_seeded_and_loses_nothing():
    whole = Arrays(*numbered(50))
    train, test = whole.split(0.2, seed=3)
    assert (len(train), len(test)) == (40, 10)
    labels = np.concatenate([train.arrays()[1], test.arrays()[1]])
    assert sorted(labels) == list(range(50)) and labels.tolist() != list(range(50))
    assert (whole.split(10, seed=3)[1].arrays()[1] == test.arrays()[1]).all()
    assert (whole.split(10, seed=4)[1].arrays()[1] != test.arrays()[1]).any()
    assert [int(y) for _, y in train] == train.arrays()[1].tolist()
    whole.x[11] = np.nan
    with pytest.raises(UserError, match=r"x\[11\]\[0\] = nan"):
        [part.arrays() for part in (train, test)]
    for bad in (0, 50, 1.0, 0.0, float("nan"), -1):
        with pytest.raises(UserError, match=r"^test=.* must"):
            whole.split(bad)


def test_flattened_inputs_are_rows():
    y = np.arange(12) % 3
    images = np.random.default_rng(0).standard_normal((12, 4, 3))
    for dataset in (Arrays(images, y), Items(list(zip(images, y, strict=True)))):
        x, labels = flattened(dataset).arrays(dtype="float64")
        assert (x == images.reshape(12, 12)).all() and (labels == y).all()
        assert flattened(dataset).read(np.arange(0))[0].shape == (0, 12)
        train, test = flattened(dataset).split(4)
        assert train.arrays()[0].shape == (8, 12) and flattened(test).arrays()[0].shape == (4, 12)
    assert flattened(Arrays(y, y)).arrays()[0].shape == (12, 1)
    assert flattened(Arrays(images[:0], y[:0])).arrays()[0].shape == (0, 12)
    images[5, 2, 1] = np.nan
    with pytest.raises(UserError, match=r"x\[5\]\[2\]\[1\] = nan"):
        flattened(Arrays(images, y)).arrays()


def test_classes_are_counted_by_the_largest_label():
    """In several batches of labels."""

    def count(labels, classes=None):
        y = np.asarray(labels)
        return count_classes(Arrays(np.zeros(len(y)), y, name="d.npz"), classes)

    assert count([0, 2, 1]) == 3 and count(np.arange(9, dtype=np.uint8)) == 9
    assert count([[0, 1], [1, 0]]) == 2 and count([0, 2, 1], 40) == 40
    stray, place = np.zeros(tasks.BATCH + 11, int), tasks.BATCH + 6
    stray[place] = 10**9
    assert count(stray, 10**9 + 1) == 10**9 + 1
    for message, labels, classes in [
        (
            rf"^d.npz: y\[{place}\] = 1000000000 would make 1000000001 classes of "
            rf"{len(stray)} samples: give --classes 1000000001 if that is right$",
            stray,
            None,
        ),
        (rf"^d.npz: y\[{place}\] = 1000000000 is out of range: must be from 0 to 9$", stray, 10),
        (r"^d.npz: y\[5\] = -1 is out of range: must be at least 0$", [0, 0, 0, 0, 0, -1], None),
        (r"^d.npz: y\[0\] = 18446744073709551615 is out", np.array([2**64 - 1], "u8"), None),
        (r"^classes=0 must be a whole number, at least 1$", [0], 0),
        (r"^d.npz: y holds no labels", np.zeros(0, int), None),
    ]:
        with pytest.raises(UserError, match=message):
            count(labels, classes)


def test_digits():
    pytest.importorskip("sklearn")
    train, test = data.digits(seed=0)
    assert train.x.shape == (1437, 64) and test.x.shape == (360, 64)
    assert train.x.dtype == np.float32 and (train.x.min(), train.x.max()) == (0, 1)
    assert train.y.dtype == np.int64 and set(train.y) == set(range(data.DIGITS_CLASSES))
    assert (data.digits(seed=0)[1].x == test.x).all()
    assert (data.digits(seed=1)[1].x != test.x).any()


def test_digits_are_scikit_learns_wherever_it_keeps_them(monkeypatch):
    pytest.importorskip("sklearn")
    read = data.digits()[0]
    monkeypatch.setattr(bundled, "FILE", "elsewhere")
    other = data.digits()[0]
    assert (read.x == other.x).all() and (read.y == other.y).all()


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"pip install '\.\[train\]'"):
        data.digits()
