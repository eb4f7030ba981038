"""Ranks that disagree, or of which one has a problem: one error on all, that says who and what."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from few_weights import errors_of, last

from parallel_sgd import SGD, Adam, DataParallelSGD, Learner, Parameters
from parallel_sgd.schedules import Schedule, Steps
from parallel_sgd.training import learner as learner_module


def test_no_problem_is_no_error(on_ranks):
    assert errors_of(on_ranks, lambda comm: comm.raise_together(None))[0] is None


def test_the_problem_of_one_rank(on_ranks):
    message, size = errors_of(
        on_ranks, lambda comm: comm.raise_together("no data" if last(comm) else None)
    )
    assert message == f"no data (on rank {size - 1})"


def test_one_problem_of_several_ranks_is_told_once(on_ranks):
    message, size = errors_of(on_ranks, lambda comm: comm.raise_together("disk full"))
    ranks = "rank 0" if size == 1 else "ranks " + ", ".join(map(str, range(size)))
    assert message == f"disk full (on {ranks})"


def test_different_problems_are_all_told(on_ranks):
    message, size = errors_of(on_ranks, lambda comm: comm.raise_together(f"port {comm.rank}"))
    assert message == "; ".join(f"port {k} (on rank {k})" for k in range(size))


def test_ranks_that_agree(on_ranks):
    facts = {"layout": {"W": (3, 4)}, "lr": 0.1}
    assert errors_of(on_ranks, lambda comm: comm.require_agreement(facts))[0] is None


def test_the_first_fact_that_differs_is_named(on_ranks):
    def body(comm):
        comm.require_agreement({"same": 1, "lr": 0.2 if last(comm) else 0.1, "n": comm.rank})

    message, size = errors_of(on_ranks, body)
    if size == 1:
        assert message is None
    else:
        others = "rank 0" if size == 2 else "ranks " + ", ".join(map(str, range(size - 1)))
        assert message == (
            f"lr must be the same on all ranks, but differs: {others}: 0.1; rank {size - 1}: 0.2"
        )


def test_a_fact_that_one_rank_lacks_differs(on_ranks):
    def body(comm):
        comm.require_agreement({"a": 1} if last(comm) and comm.rank else {"a": 1, "b": 2})

    message, size = errors_of(on_ranks, body)
    assert (message is None) == (size == 1)
    assert size == 1 or message.endswith(f"rank {size - 1}: nothing")


def test_a_fact_that_only_other_ranks_have_differs(on_ranks):
    def body(comm):
        comm.require_agreement({"a": 1, "b": 2} if comm.rank else {"a": 1})

    message, size = errors_of(on_ranks, body)
    assert (message is None) == (size == 1)
    assert size == 1 or message.startswith(
        "b must be the same on all ranks, but differs: rank 0: n"
    )


def zeros(shapes, dtype=np.float32):
    return Parameters({name: np.zeros(shape, dtype) for name, shape in shapes.items()})


def of_all_options(**options):
    """None of them is without effect."""
    return DataParallelSGD(gradient_bits={0: 16, 9: 1}, **options)


USUAL = {
    "parameters": lambda: zeros({"W": (2, 3), "b": (6,)}),
    "optimizer": lambda: SGD(lr=0.1),
    "algorithm": of_all_options,
}


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
        given = {name: make() for name, make in USUAL.items()}
        if last(comm) and comm.rank:
            given[argument] = other()
        before = given["parameters"].flat.copy()
        try:
            Learner(**given, comm=comm)
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
        given = {name: make() for name, make in USUAL.items()}
        Learner(**{**given, argument: other() if last(comm) else one()}, comm=comm)

    assert errors_of(on_ranks, body)[0] is None


def test_schedules_of_a_users_own_that_differ(on_ranks):
    def body(comm):
        given = {name: make() for name, make in USUAL.items()}
        Learner(**{**given, "optimizer": SGD(lr=Ramp(8 if last(comm) else 9))}, comm=comm)

    message, size = errors_of(on_ranks, body)
    assert (message is None) == (size == 1)
    assert size == 1 or f"rank {size - 1}: Ramp(width=8)" in message


def test_another_version_of_the_library(on_ranks, monkeypatch):
    here = threading.local()  # a rank may be a thread

    class Version:
        def __repr__(self):
            return "'0.0.1'" if here.old else "'9.9.9'"

    monkeypatch.setattr(learner_module, "__version__", Version())

    def body(comm):
        here.old = last(comm) and comm.rank > 0
        Learner(**{name: make() for name, make in USUAL.items()}, comm=comm)

    message, size = errors_of(on_ranks, body)
    assert (message is None) == (size == 1)
    assert size == 1 or message.startswith("parallel_sgd version must be the same on all ranks")


def test_all_ranks_start_from_the_first_ones_parameters(comm):
    parameters = zeros({"W": (2, 3), "b": (6,)})
    parameters.flat[:] = comm.rank + np.arange(12)
    Learner(parameters, SGD(lr=0.1), DataParallelSGD(), comm)
    assert np.array_equal(parameters.flat, np.arange(12))
