"""Outer steps that do not wait for late ranks: what is refused, and how a problem ends them.

Which ranks take part, and what becomes of the others, is in tests/exploration/test_quorum.py.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from parallel_sgd import SGD, Adam, DiLoCo, Learner, ModelAveragingSGD, Parameters, UserError
from parallel_sgd.data import Source


def learner_of(comm, algorithm, optimizer=None, **options):
    parameters = Parameters({"w": np.zeros(5), "v": np.zeros(2)})
    return Learner(parameters, optimizer or SGD(lr=0.1), algorithm, comm, **options)


@pytest.mark.parametrize("too_many", [False, True], ids=["too few", "too many"])
def test_a_quorum_is_a_majority(comm, too_many):
    most = comm.size // 2 + 1
    quorum = comm.size + 1 if too_many else most - 1
    if quorum:  # a quorum of 0 is never valid
        message = f"quorum={quorum} must be {most} to {comm.size} on {comm.size} ranks: more than"
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            learner_of(comm, DiLoCo(sync_steps=3, quorum=quorum))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": 0}, "quorum=0 must be"),
        ({"grace_s": -1}, "grace_s=-1 must be"),
        ({"quorum": 2, "fragments": 3}, "fragments=3 must be 1 with quorum or grace_s"),
        ({"grace_s": 1, "overlap_samples": 9}, "overlap_samples=9 must be 0 with quorum"),
        ({"quorum": 2, "inner_state": "average"}, "the local optimizer's state must be kept or"),
    ],
)
def test_options_that_need_all_ranks(options, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        DiLoCo(sync_steps=3, **options)


def test_skipping_needs_all_ranks(comm):
    with pytest.raises(UserError, match=r"^not_finite='skip' must be 'stop' with quorum"):
        learner_of(comm, DiLoCo(sync_steps=3, grace_s=1), not_finite="skip")


def test_measured_shares_need_all_ranks(comm):
    with learner_of(comm, DiLoCo(sync_steps=3, grace_s=1)) as learner:
        source = Source(np.zeros((90, 5)), np.zeros(90), minibatch_size=30, shares="measured")
        with pytest.raises(UserError, match=r"^shares='measured' must be numbers with quorum"):
            next(iter(source.minibatches(learner)))


def test_the_samples_of_all_ranks_must_be_announced(comm):
    learner = learner_of(comm, DiLoCo(sync_steps=3, grace_s=1))
    with pytest.raises(UserError, match=r"^quorum and grace_s need the samples of all ranks bef"):
        learner.step(samples=1)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("at", ["a block's end", "a meeting", "the end"])
def test_a_problem_of_one_rank_ends_all(comm, at, steps):
    """Where the others wait for an outer step, and where they wait for all ranks."""
    block = 1 if steps == 0 else 2
    learner = learner_of(comm, ModelAveragingSGD(sync_steps=block, quorum=comm.size))
    for _ in range(4):
        learner.announce(1, comm.size)
    for _ in range(steps):
        learner.step(samples=1)
    if comm.rank < comm.size - 1 and steps == 2 and at == "a block's end":
        learner.step(samples=1)
    calls = {
        "a block's end": lambda: learner.step(samples=1),
        "a meeting": learner.meet,
        "the end": learner.finish,
    }
    fails = comm.rank == comm.size - 1
    with pytest.raises(UserError, match=rf"^a bad file \(on rank {comm.size - 1}\)$"):
        learner.fail("a bad file") if fails else calls[at]()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_that_is_not_finite_ends_an_outer_step(comm, value):
    learner = learner_of(comm, DiLoCo(sync_steps=2, quorum=comm.size), Adam(lr=0.1))
    for _ in range(2):
        learner.announce(1, comm.size)
    learner.step(samples=1)
    learner.parameters.flat[...] = value if comm.rank == 0 else 1
    with pytest.raises(UserError, match="model's change over the block"):
        learner.step(samples=1)
    assert not learner.parameters.flat.any()  # the common model


def test_the_numbers_of_outer_steps_are_reported(comm):
    with learner_of(comm, DiLoCo(sync_steps=2, grace_s=100)) as learner:
        for _ in range(5):
            learner.announce(1, comm.size)
            learner.step(samples=1)
        learner.finish()
        assert learner.report()["outer_steps"] == {"taken": 2, "late": 0, "oldest": 0}
