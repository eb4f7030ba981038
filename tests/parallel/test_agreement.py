"""Ranks that disagree, or of which one has a problem: one error on all, that says who and what."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from few_weights import disagreement, errors_of, last, named

from parallel_sgd import SGD, Adam, DataParallelSGD, Learner, Parameters
from parallel_sgd.schedules import Schedule, Steps
from parallel_sgd.training import arguments

pytestmark = pytest.mark.messages


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (lambda comm: None, lambda size: None),
        (
            lambda comm: "no data" if last(comm) else None,
            lambda size: f"no data (on rank {size - 1})",
        ),
        (lambda comm: "disk full", lambda size: f"disk full (on {named(range(size))})"),
        (
            lambda comm: f"port {comm.rank}",
            lambda size: "; ".join(f"port {k} (on rank {k})" for k in range(size)),
        ),
    ],
    ids=["none", "on one rank", "the same on several ranks", "different ones"],
)
def test_problems_are_told_on_all_ranks(on_ranks, problem, message):
    told, size = errors_of(on_ranks, lambda comm: comm.raise_together(problem(comm)))
    assert told == message(size)


def test_a_part_finds_problems_of_all_ranks(on_ranks):
    """Of equal parts that agree together: sums are of the part, problems of all parts."""

    def body(comm):
        with comm.split(comm.rank % 2 if comm.size % 2 == 0 else comm.rank) as part:
            part.wider = comm
            assert part.agree(None, 3) == 3 * part.size
            part.agree("no data" if last(comm) else None)

    told, size = errors_of(on_ranks, body)
    assert told == f"no data (on rank {size - 1})"


@pytest.mark.parametrize(
    ("usual", "other", "fact", "values"),
    [
        ({"same": 1, "lr": 0.1, "n": 5}, {"same": 1, "lr": 0.2, "n": 6}, "lr", (0.1, 0.2)),
        ({"a": 1, "b": 2}, {"a": 1}, "b", (2, "nothing")),
        ({"a": 1}, {"a": 1, "b": 2}, "b", ("nothing", 2)),
    ],
)
def test_the_first_fact_that_differs_is_named(on_ranks, usual, other, fact, values):
    def body(comm):
        comm.require_agreement(usual)
        comm.require_agreement(other if last(comm) and comm.size > 1 else usual)

    message, size = errors_of(on_ranks, body)
    assert message == disagreement(fact, size, *values)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda comm: comm.raise_together([3] if last(comm) else None),
            "problem=[3] must be a text or None",
        ),
        (
            lambda comm: comm.require_agreement(None if last(comm) else {"a": 1}),
            "facts=None must be a mapping from names to values",
        ),
    ],
    ids=["a problem", "facts"],
)
def test_what_one_rank_gives_wrongly_is_told_on_all_ranks(on_ranks, given, message):
    told, size = errors_of(on_ranks, given)
    assert told == f"{message} (on rank {size - 1})"


def zeros(shapes, dtype=np.float32):
    return Parameters({name: np.zeros(shape, dtype) for name, shape in shapes.items()})


def of_all_options(**options):
    """None of them is without effect."""
    return DataParallelSGD(gradient_bits={0: 16, 9: 1}, **{"code": "sign", **options})


def make_learner(comm, **other):
    given = {
        "parameters": zeros({"W": (2, 3), "b": (6,)}),
        "optimizer": SGD(lr=0.1),
        "algorithm": of_all_options(),
    }
    return Learner(**{**given, **other}, comm=comm)


@pytest.mark.parametrize(
    ("fact", "argument", "other"),
    [
        ("number of parameters", "parameters", lambda: zeros({"W": (2, 3)})),
        ("layout of the parameters", "parameters", lambda: zeros({"W": (3, 2), "b": (6,)})),
        ("layout of the parameters", "parameters", lambda: zeros({"V": (2, 3), "b": (6,)})),
        ("layout of the parameters", "parameters", lambda: zeros({"b": (6,), "W": (2, 3)})),
        ("dtype of the parameters", "parameters", lambda: zeros({"W": (2, 3), "b": 6}, float)),
        ("lr of the optimizer", "optimizer", lambda: SGD(lr=0.2)),
        ("lr of the optimizer", "optimizer", lambda: SGD(lr=Steps({0: 0.1}))),
        ("optimizer", "optimizer", lambda: Adam(lr=0.1)),
        ("gradient_bits of the algorithm", "algorithm", lambda: DataParallelSGD(gradient_bits=1)),
        ("gradient_bits of the", "algorithm", lambda: DataParallelSGD(gradient_bits={0: 32, 9: 1})),
        ("block_size of the algorithm", "algorithm", lambda: of_all_options(block_size=512)),
        ("threshold of the algorithm", "algorithm", lambda: of_all_options(threshold="mean")),
        ("code of the algorithm", "algorithm", lambda: of_all_options(code="entropy")),
        (
            "half_format of the algorithm",
            "algorithm",
            lambda: of_all_options(half_format="bfloat16"),
        ),
        ("distributed_after of the", "algorithm", lambda: of_all_options(distributed_after=1)),
    ],
)
def test_learners_that_disagree(on_ranks, fact, argument, other):
    def body(comm):
        given = {"parameters": zeros({"W": (2, 3), "b": (6,)})}
        if last(comm) and comm.rank:
            given[argument] = other()
        before = given["parameters"].flat.copy()
        try:
            make_learner(comm, **given)
        finally:
            assert np.array_equal(given["parameters"].flat, before)

    message, size = errors_of(on_ranks, body)
    if size == 1:
        assert message is None
    else:
        assert message.startswith(fact)
        assert " must be the same on all ranks, but differs: " in message
        assert f"rank {size - 1}: " in message


@dataclass(frozen=True)
class Ramp(Schedule):
    """A user's own schedule."""

    width: int

    def __call__(self, samples):
        return min(samples / self.width, 1.0)


@pytest.mark.parametrize(
    ("argument", "one", "other"),
    [
        ("optimizer", lambda: SGD(lr=0.1), lambda: SGD(lr=np.float64(0.1))),
        ("optimizer", lambda: SGD(lr=1), lambda: SGD(lr=1.0)),
        ("optimizer", lambda: SGD(lr=Ramp(9)), lambda: SGD(lr=Ramp(9))),
        (
            "optimizer",
            lambda: SGD(lr=Steps({0: 0.1, 9: 0.2})),
            lambda: SGD(lr=Steps({9: 0.2, np.int64(0): np.float64(0.1)})),
        ),
        (
            "algorithm",
            lambda: DataParallelSGD(block_size=64),
            lambda: DataParallelSGD(block_size=np.int64(64), distributed_after=np.int64(0)),
        ),
        (
            "algorithm",
            lambda: DataParallelSGD(gradient_bits={0: 32, 10: 1}),
            lambda: DataParallelSGD(gradient_bits={10: np.int8(1), 0: 32}),
        ),
    ],
)
def test_learners_that_agree_in_other_words(on_ranks, argument, one, other):
    def body(comm):
        make_learner(comm, **{argument: other() if last(comm) else one()})

    assert errors_of(on_ranks, body)[0] is None


def test_schedules_of_a_users_own_that_differ(on_ranks):
    def body(comm):
        make_learner(comm, optimizer=SGD(lr=Ramp(8 if last(comm) else 9)))

    message, size = errors_of(on_ranks, body)
    assert (message is None) == (size == 1)
    assert size == 1 or f"rank {size - 1}: Ramp(width=8)" in message


def test_another_version_of_the_library(on_ranks, monkeypatch):
    here = threading.local()  # a rank may be a thread

    class Version:
        def __repr__(self):
            return "'0.0.1'" if here.old else "'9.9.9'"

    monkeypatch.setattr(arguments, "__version__", Version())

    def body(comm):
        here.old = last(comm) and comm.rank > 0
        make_learner(comm)

    message, size = errors_of(on_ranks, body)
    assert (message is None) == (size == 1)
    assert size == 1 or message.startswith("parallel_sgd version must be the same on all ranks")


def test_all_ranks_start_from_the_first_ones_parameters(comm):
    parameters = zeros({"W": (2, 3), "b": (6,)})
    parameters.flat[:] = comm.rank + np.arange(12)
    make_learner(comm, parameters=parameters)
    assert np.array_equal(parameters.flat, np.arange(12))
