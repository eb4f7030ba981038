"""Sequences of uneven lengths, and their minibatches: K ranks are K fake learners in turn."""

from __future__ import annotations

import re
from itertools import chain, pairwise

import numpy as np
import pytest
from fake_learners import Comm, Learner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal as same

from parallel_sgd.data import Padded, SequenceArrays, SequenceSource, as_sequences, padded
from parallel_sgd.data.sources.sequences import balanced
from parallel_sgd.errors import SharedError, UserError

repeatable = settings(deadline=None, derandomize=True, database=None)

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def numbered(lengths):
    """Sequence i is of tokens 100 i, 100 i + 1, …; its label is i, those of tokens the tokens."""
    return [100 * i + np.arange(length) for i, length in enumerate(lengths)]


def run(lengths, size, minibatch_size, position=0, distributed=True, **options):
    """For each minibatch what each rank got: numbers of sequences. What is read is checked."""
    learners = [Learner(Comm(rank, size), distributed, position) for rank in range(size)]
    x = numbered(lengths)
    source = SequenceSource(x, np.arange(len(x)), minibatch_size, **options)
    dealt = []
    for parts in zip(*(source.minibatches(learner) for learner in learners), strict=True):
        for part, y in parts:
            assert part.lengths.tolist() == [lengths[i] for i in y]
            assert part.values.shape == (len(y), max(part.lengths, default=1))
            assert part.values.dtype == y.dtype == np.int64
            for row, length, i in zip(part.values, part.lengths, y, strict=True):
                same(row, np.append(x[i], np.zeros(part.values.shape[1] - length)))
        tokens = options.get("unit", "tokens") == "tokens"
        units = [part.tokens if tokens else len(y) for part, y in parts]
        total = sum(units) if distributed else units[0]
        for learner, own in zip(learners, units, strict=True):
            assert learner.expected == (own, total)
            learner.samples += total
        dealt.append([y.tolist() for _, y in parts])
    return dealt


def joined(lists):
    return list(chain.from_iterable(lists))


@repeatable
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(0, 40),
    st.sampled_from(["tokens", "sequences"]),
    st.integers(0, 3),
)
def test_every_sequence_once_an_epoch_whatever_the_ranks(lengths, size, more, unit, seed):
    minibatch_size = (max(lengths) if unit == "tokens" else 1) + more
    options = {"unit": unit, "seed": seed, "epochs": 2}
    alone = [joined(parts) for parts in run(lengths, 1, minibatch_size, **options)]
    dealt = run(lengths, size, minibatch_size, **options)
    assert [joined(parts) for parts in dealt] == alone
    order = joined(alone)
    n = len(lengths)
    assert sorted(order[:n]) == sorted(order[n:]) == list(range(n))
    units = [sum(lengths[i] if unit == "tokens" else 1 for i in each) for each in alone]
    assert max(units) <= minibatch_size
    for parts in dealt:
        if len(joined(parts)) >= size:
            assert all(parts)
    # each minibatch is the longest that there is room for
    first = [sum(units[: k + 1]) for k in range(len(units))]
    epoch = sum(lengths) if unit == "tokens" else n
    for k in range(len(units) - 1):
        following = lengths[alone[k + 1][0]] if unit == "tokens" else 1
        assert units[k] + following > minibatch_size or first[k] == epoch


@pytest.mark.parametrize("unit", ["tokens", "sequences"])
def test_going_on_with_another_number_of_ranks(unit):
    whole = run(LENGTHS, 2, 12, unit=unit, epochs=3, seed=4)
    position = 0
    for done, parts in enumerate(whole):
        rest = run(LENGTHS, 3, 12, position, unit=unit, epochs=3, seed=4)
        assert [joined(p) for p in rest] == [joined(p) for p in whole[done:]]
        position += sum(LENGTHS[i] if unit == "tokens" else 1 for i in joined(parts))
    assert run(LENGTHS, 3, 12, position, unit=unit, epochs=3, seed=4) == []


def test_a_learner_that_stands_within_a_sequence():
    with pytest.raises(SharedError, match="no sequence of epoch 1 begins after the 78 samples"):
        run(LENGTHS, 3, 12, sum(LENGTHS) + 1, shuffle=False, epochs=2)


def test_sizes_by_samples():
    """Whoever goes on in the midst gets the same minibatches."""
    sizes = {0: 9, 30: 20}
    parts = run(LENGTHS, 2, sizes, shuffle=False)
    tokens = [sum(LENGTHS[i] for i in joined(part)) for part in parts]
    assert tokens == [9, 5, 9, 8, 13, 17, 16] and sum(tokens) == sum(LENGTHS)
    assert run(LENGTHS, 2, sizes, sum(tokens[:4]), shuffle=False) == parts[4:]
    assert run(LENGTHS, 2, lambda seen: 9 if seen < 30 else 20, shuffle=False) == parts
    with pytest.raises(
        SharedError, match=r"minibatch_size=8 must be at least .*: sequence 5 has 9"
    ):
        run(LENGTHS, 2, lambda seen: 8, shuffle=False)


def test_orders_differ_by_seed_and_epoch():
    first, again, other = (run(LENGTHS, 1, 100, seed=s, epochs=2) for s in (0, 0, 1))
    assert first == again
    assert len({str(epoch) for epoch in (*first, *other)}) == 4
    assert joined(joined(run(LENGTHS, 2, 9, shuffle=False))) == list(range(len(LENGTHS)))


def test_a_warm_start_gives_every_rank_the_whole():
    dealt = run(LENGTHS, 3, 30, distributed=False)
    assert all(parts[0] == parts[1] == parts[2] for parts in dealt)
    assert sorted(joined(parts[0] for parts in dealt)) == list(range(len(LENGTHS)))


@repeatable
@example([1, 1, 1, 10], 3)
@example([10] * 5 + [1] * 50, 2)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 6))
def test_parts_are_balanced_by_tokens(lengths, size):
    cuts = balanced(np.array(lengths), (1,) * size)
    assert cuts[0] == 0 and cuts[-1] == len(lengths) and (np.diff(cuts) >= 0).all()
    parts = [sum(lengths[a:b]) for a, b in pairwise(cuts)]
    assert sum(map(bool, parts)) == min(size, len(lengths))
    if min(np.diff(cuts)) > 1:  # then no cut is pushed aside, so that every part has one
        shares = np.arange(size + 1) * sum(lengths) / size
        assert (abs(np.cumsum([0, *parts]) - shares) <= max(lengths) / 2).all()


def test_labels_of_tokens_are_padded():
    x = [np.ones((n, 2)) * n for n in (2, 3)]
    y = [np.array([4, 5]), np.array([6, 7, 8])]
    source = SequenceSource(x, y, 5, shuffle=False, classes=9, y_fill=-100)
    ((values, labels),) = source.minibatches(Learner())
    assert values.values.dtype == np.float32 and values.values.shape == (2, 3, 2)
    assert values.values[:, :, 0].tolist() == [[2, 2, 0], [3, 3, 3]]
    assert labels.values.tolist() == [[4, 5, -100], [6, 7, 8]]
    assert labels.lengths.tolist() == [2, 3] and values.tokens == 5


def test_fewer_sequences_than_ranks():
    learners = [Learner(Comm(rank, 3)) for rank in range(3)]
    source = SequenceSource([np.ones((4, 2))], [[1]], 9)
    (_, (x, y), _) = (next(source.minibatches(learner)) for learner in learners)
    assert x.values.shape == (0, 1, 2) and x.lengths.shape == (0,) and x.tokens == 0
    assert isinstance(y, Padded) and y.values.shape == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], []), {}, "x must be a list of at least one array: it is a list"),
        (("abc", [1]), {}, "x must be a list of at least one array"),
        (([[1], []], [1, 2]), {}, "x[1] must hold at least one token: its shape is [0]"),
        (([[1], 2], [1, 2]), {}, "x[1] must hold at least one token: its shape is []"),
        (([[1], [2.0]], [1, 2]), {}, "x[1] holds float64 []: must be int64 [], as x[0]"),
        (([[1], [[2]]], [1, 2]), {}, "x[1] holds int64 [1]: must be int64 [], as x[0]"),
        (([[None]], [1]), {}, "x[0] must hold plain numbers"),
        (([[1], [2]], [1]), {}, "x and y must have equal lengths: 2 and 1"),
        (([[1], [2]], 3), {}, "y must have one row for each sequence: it is an int"),
        (([[1]], [3, [4]]), {}, "y must be a NumPy array: it is a list"),
        (([[1]], [[[1], [2, 3]]]), {}, "y[0] must be a NumPy array: it is a list"),
        (([[1]], None), {}, "y must hold plain numbers: it has dtype object"),
        (([[1], [2]], [[1]]), {}, "x and y must have equal lengths: 2 and 1"),
        (([[1]], [[None]]), {}, "y[0] must hold plain numbers"),
        (([[1]] * 2 + [[1] * 5], [1, 2, 3], 4), {}, "minibatch_size=4 must be at least the tokens"),
        (([[1] * 5], [1], {0: 5, 9: 4}), {}, "minibatch_size=4 must be at least the tokens of"),
        (([[1]], [1], 1), {"unit": "words"}, "unit='words' must be 'tokens' or 'sequences'"),
        (([[1]], [1], 1), {"y_fill": 0.5}, "y_fill=0.5 must be a whole number"),
        (([[1]] * 2, [1, 2], 1), {"epochs": 1 << 62}, "of 2 samples: must be less than 2**63"),
        (([[1, 2]], [1], 2), {"epochs": 1 << 62}, "of 2 tokens: must be less than 2**63"),
    ],
)
def test_what_is_refused(arguments, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        SequenceSource(*arguments, **options)


def test_sequences_have_labels_of_their_own():
    sequences = SequenceArrays([[1]], [1])
    assert as_sequences(sequences) is sequences
    with pytest.raises(UserError, match="y must not be given with sequences"):
        as_sequences(sequences, [1])


def test_what_is_wrong_is_named_by_its_place():
    x, y = [[1.0], [2.0, np.nan]], [[1], [2, 3]]
    with pytest.raises(UserError, match=re.escape("x[1][1] = nan is not finite")):
        SequenceArrays(x, y).read(np.array([0, 1]))
    with pytest.raises(UserError, match=re.escape("y[1][0] = 2 is out of range")):
        SequenceArrays(x[:1] * 2, y).read(np.array([0, 1]), classes=2)
    with pytest.raises(
        UserError, match=re.escape("sequences must be a list of at least one array")
    ):
        padded([])
