"""Hashed n-grams of the library's source, and items given together with the next one."""

from __future__ import annotations

import numpy as np
import pytest

from parallel_sgd.data import NGrams, library_ngrams, library_source, with_next
from parallel_sgd.errors import UserError

FILES = {"a.py": b"import os\nimport re\n", "b.py": b"", "c.py": bytes(range(40)), "d.py": b"im"}


def before(files, order):
    """The `order` bytes before every byte, one at a time."""
    texts = []
    for content in files.values():
        padded = bytes(order) + content
        texts += [padded[i : i + order] for i in range(len(content))]
    return texts


@pytest.mark.parametrize("orders", [(1, 2, 3, 4, 5, 6), (3,), (5, 2), (12, 1)])
def test_equal_ngrams_have_equal_ids_and_others_do_not(orders):
    data = NGrams(FILES, orders)
    x, y = data.arrays()
    assert x.dtype == np.int64 and x.shape == (len(data), len(orders)) and x.min() >= 0
    assert bytes(y.tolist()) == b"".join(FILES.values())
    texts = {}
    for column, order in enumerate(orders):
        for text, row_id in zip(before(FILES, order), x[:, column].tolist(), strict=True):
            assert texts.setdefault(row_id, text) == text  # orders differ in length
    assert len(texts) == sum(len(set(before(FILES, order))) for order in orders)


def test_ids_are_today_what_they_were():
    """Golden: a hash that changed would make old checkpoints' rows those of other n-grams."""
    assert NGrams({"a": b"ab"}, (1, 2)).arrays()[0].tolist() == [
        [6238072747940578789, 6466913776677652822],
        [8284633090847981407, 5471024024803896807],
    ]


def test_it_is_the_library_split_as_the_other():
    train, test = library_ngrams((2, 4), most_bytes=200_000)
    others = library_source(4, most_bytes=200_000)
    for ngrams, other in zip((train, test), others, strict=True):
        assert ngrams.files == other.files and len(ngrams) == len(other)
        x, y = ngrams.read(np.arange(5000))
        windows, labels = other.read(np.arange(5000), dtype=None)
        assert (y == labels).all()
        for column, order in enumerate((2, 4)):
            texts = {row.tobytes() for row in windows[:, -order:]}
            assert len(np.unique(x[:, column])) == len(texts)
    ids = np.unique(train.arrays()[0])
    assert ids.max() > 2**62 and np.histogram(ids, 4, (0, 2.0**63))[0].std() < 0.02 * len(ids)


def test_bad_arguments_are_refused():
    for orders in ((), (1, 1), 3):
        with pytest.raises(UserError, match=r"^orders=.* must be whole numbers without repeats"):
            NGrams(FILES, orders)
    with pytest.raises(UserError, match=r"^orders\[1\]=0 must be a whole number, at least 1"):
        library_ngrams((2, 0))


def test_every_item_comes_with_the_next():
    assert list(with_next([])) == []
    assert list(with_next([1])) == [(1, None)]
    assert list(with_next(iter("abc"))) == [("a", "b"), ("b", "c"), ("c", None)]


def test_only_one_item_is_taken_ahead_and_an_end_is_passed_on():
    taken, ended = [], []

    def items():
        try:
            for i in range(5):
                taken.append(i)
                yield i
        finally:
            ended.append(True)

    pairs = with_next(items())
    assert taken == []
    assert next(pairs) == (0, 1) and taken == [0, 1]
    assert next(pairs) == (1, 2) and taken == [0, 1, 2]
    pairs.close()
    assert ended == [True]
