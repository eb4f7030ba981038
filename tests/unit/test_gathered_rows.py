"""Pushes of rows that wait for a step."""

from __future__ import annotations

import numpy as np

from parallel_sgd.embedding.gathered import GatheredRows


def pushed(*pushes, width=2):
    """Pushes of (worker, ids, one value for all of their gradients)."""
    gathered = GatheredRows(width)
    for worker, ids, value in pushes:
        gradient = np.full((len(ids), width), value, np.float32)
        gathered.add(worker, np.array(ids, np.int64), gradient)
        gradient.fill(np.nan)  # it was a copy
    return gathered


def as_dict(taken):
    ids, total = taken
    assert ids.dtype == np.int64 and total.dtype == np.float32 and len(ids) == len(total)
    return {i: row[0].item() for i, row in zip(ids.tolist(), total, strict=True)}


def test_sums_go_by_workers_whoever_came_first():
    """1e8 + 1 is 1e8 in float32: the order shows."""
    large, small = (0, [5, -9], 1e8), [(1, [5], 1.0), (2, [5, 7], -1e8)]
    for pushes in ([large, *small], [*reversed(small), large]):
        assert as_dict(pushed(*pushes).take({0: 1, 1: 1, 2: 1})) == {5: 0.0, -9: 1e8, 7: -1e8}


def test_a_step_takes_all_and_drops_what_is_of_workers_who_have_left():
    gathered = pushed((0, [1], 1.0), (3, [1, 2], 10.0), (1, [1], 100.0))
    assert as_dict(gathered.take({0: 1.0, 1: 0.5, 2: 1.0})) == {1: 51.0}
    ids, total = gathered.take({0: 1, 1: 1, 2: 1, 3: 1})
    assert ids.shape == (0,) and total.shape == (0, 2)


def test_contents_are_taken_up_by_others():
    """Of several servers each takes its own, and of fewer workers each what is left to it."""
    old = pushed((0, [1, 4], 1.0), (2, [4], 2.0), (2, [9], 3.0), (1, [4], 4.0))
    contents = old.contents()
    everyone = dict.fromkeys(range(3), 1.0)
    servers = [GatheredRows(2) for _ in range(2)]
    for number, server in enumerate(servers):
        server.load(contents, lambda ids, n=number: ids % 2 == n, workers=2)
        server.load({}, np.isfinite, workers=2)
    assert [as_dict(server.take({0: 1.0, 1: 10.0})) for server in servers] == [
        {4: 43.0},
        {1: 1.0, 9: 3.0},
    ]
    again = GatheredRows(2)
    again.load(contents, np.isfinite, workers=3)
    assert again.contents().keys() == contents.keys()
    assert all(np.array_equal(again.contents()[name], contents[name]) for name in contents)
    assert as_dict(again.take(everyone)) == as_dict(old.take(everyone))
