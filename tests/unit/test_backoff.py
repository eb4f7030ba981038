"""Pauses between questions: how many have no sleep before them, and how long the others' are."""

from __future__ import annotations

import pytest

from parallel_sgd.communication import Communicator
from parallel_sgd.communication.backoff import Backoff


def slept(backoff: Backoff, sleeps: list[float], pauses: int) -> list[float]:
    begin = len(sleeps)
    for _ in range(pauses):
        backoff.pause()
    return sleeps[begin:]


def test_sleeps_begin_after_some_questions_and_grow_to_the_longest():
    sleeps: list[float] = []
    backoff = Backoff(sleeps.append, at_once=3, first_s=1.0, growth=2.0, longest_s=5.0)
    assert slept(backoff, sleeps, 3) == []
    assert slept(backoff, sleeps, 5) == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert slept(backoff, sleeps, 4) == [1.0]


@pytest.mark.parametrize(
    ("waits", "moving", "at_once", "first_s", "longest_s"),
    [
        ("endpoint", False, 40, 2e-5, 1e-3),  # for an answer, and for a body
        ("endpoint", True, 400, 2e-5, 5e-5),
        ("messages", False, 50, 5e-5, 5e-5),  # for other ranks, and for this one's computation
        ("messages", True, 0, 5e-5, 1e-3),
    ],
)
def test_what_was_measured_to_be_good(waits, moving, at_once, first_s, longest_s):
    comm = Communicator.single()
    ours = comm.endpoint([0], serving=False) if waits == "endpoint" else comm.messages()
    sleeps: list[float] = []
    ours.idle = sleeps.append  # type: ignore[method-assign]
    kind = {"moving" if waits == "endpoint" else "computing": moving}
    backoff = ours.backoff(**kind)
    assert slept(backoff, sleeps, at_once) == []
    assert slept(backoff, sleeps, 200)[0] == first_s
    assert sleeps[-1] == max(sleeps) == longest_s
