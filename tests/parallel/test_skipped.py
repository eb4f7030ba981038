"""Numbers that are not finite, left out by all ranks together; and ranks that differ by a bit."""

from __future__ import annotations

import numpy as np
import pytest
from cases import zeros
from few_weights import errors_of, last
from skipped import (
    ADAM,
    ALGORITHMS,
    CULPRITS,
    ends_where_it_goes_on,
    goes_back_to_the_common_model,
    leaves_no_trace,
    names_who_differs,
    refuses_a_push,
    step,
    what_is_left_out_is_not_owed,
)

import parallel_sgd as psgd
from parallel_sgd.training import Snapshot

pytestmark = [pytest.mark.threads(1, 3), pytest.mark.ranks(3)]


@pytest.mark.parametrize("culprit", CULPRITS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_left_out_leaves_no_trace(comm, name, culprit):
    leaves_no_trace(comm, name, culprit)


@pytest.mark.parametrize("culprit", CULPRITS)
def test_a_block_with_overlap_goes_back_to_the_common_model(comm, culprit):
    goes_back_to_the_common_model(comm, culprit)


@pytest.mark.parametrize("overlap", [False, True])
def test_residuals_hold_nothing_of_it(comm, overlap):
    what_is_left_out_is_not_owed(comm, overlap)


def test_what_is_undone_leaves_nothing_to_be_left_out(comm):
    """A loss of a trial, told in the midst of a block; and what was left out in it."""
    learner = psgd.Learner(zeros("one block"), ADAM, ALGORITHMS["blocks"][0], comm)
    before = Snapshot()
    before.take(learner)
    learner.skipped.check_loss(np.nan)
    learner.skipped.count("", 1, 2, 0, 2)
    before.restore(learner)
    assert learner.skipped.problem(None) is None and not learner.skipped.is_latest(2)


def test_residuals_of_what_others_send_are_not_forgotten(comm):
    """Those that a rank still has after a checkpoint was loaded: an exchange that is given up has
    not sent them."""
    algorithm, optimizer, _ = ALGORITHMS["overlap"]
    learner = psgd.Learner(zeros("one block"), optimizer, algorithm, comm, not_finite="skip")
    residuals = learner.state.exchange.residuals
    for bad in (True, False):
        residuals.has_non_owned = True
        residuals.worker_error[...] = kept = 0.125 * (1 + comm.rank)
        step(learner, 1, bad="gradient" * bad)
        assert residuals.has_non_owned == bad
        assert np.all(residuals.worker_error == kept) == bad


@pytest.mark.parametrize("name", ["overlap", "warm start", "blocks, overlap"])
def test_a_model_that_is_beyond_help_ends_training(comm, name):
    ends_where_it_goes_on(comm, name)


@pytest.mark.threads(3)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("currency", ["gradients", "deltas"])
def test_a_worker_leaves_out_its_push(comm, currency, mode):
    if mode == "async" and comm.size > 2:  # alone it is told when
        comm = comm.split(int(comm.rank == 2))
        if comm.size == 1:
            return
    refuses_a_push(comm, currency, mode)


@pytest.mark.threads(1, 2, 3)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("what", ["model", "momentum", "block"])
def test_a_bit_that_flips_is_found_and_the_rank_is_named(comm, what, every):
    names_who_differs(comm, what, every)


def test_ranks_that_are_never_compared(comm):
    learner = psgd.Learner(zeros("one block"), ADAM, psgd.DataParallelSGD(), comm, compare_every=0)
    learner.parameters.flat[0] += comm.rank
    for number in range(70):
        step(learner, number)
    learner.finish()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"not_finite": "reduce"}, "not_finite='reduce' must be 'stop' or 'skip'"),
        ({"most_skipped": -1}, "most_skipped=-1 must be"),
        ({"compare_every": 0.5}, "compare_every=0.5 must be"),
    ],
)
def test_what_cannot_be_asked_for(on_ranks, given, message):
    def body(comm):
        psgd.Learner(zeros("one block"), ADAM, psgd.DataParallelSGD(), comm, **given)

    assert errors_of(on_ranks, body)[0].startswith(message)


class GoesByItself(psgd.DataParallelSGD):
    synchronizes_every_step = False


def test_an_algorithm_that_cannot_leave_anything_out(on_ranks):
    def body(comm):
        psgd.Learner(zeros("one block"), ADAM, GoesByItself(), comm, not_finite="skip")

    message, _ = errors_of(on_ranks, body)
    assert message.startswith(
        "not_finite='skip' needs an algorithm that can skip: GoesByItself does not synchronize in "
    )


def test_ranks_that_are_asked_for_different_things(on_ranks):
    def body(comm):
        policy = "skip" if last(comm) else "stop"
        psgd.Learner(zeros("one block"), ADAM, psgd.DataParallelSGD(), comm, not_finite=policy)

    message, size = errors_of(on_ranks, body)
    if size > 1:
        assert message.startswith("not_finite must be the same on all ranks, but differs: ")


@pytest.mark.threads(3)
@pytest.mark.parametrize("distributed_after", [0, 1000])
def test_workers_of_servers_do_not_go_on_for_ever(on_ranks, distributed_after):
    """One of them alone, or in the warm start all; servers hear of it, too."""

    def body(comm):
        algorithm = psgd.DataParallelASGD(
            servers=1, sync_steps=1, distributed_after=distributed_after
        )
        how = {"not_finite": "skip", "most_skipped": 3}
        with psgd.Learner(zeros("one block"), ADAM, algorithm, comm, **how) as learner:
            for _ in range(0 if learner.serves else 50):
                learner.gradient.flat[:] = 0.5
                if learner.comm.rank == 1:
                    learner.gradient.flat[3] = float("nan")
                before = learner.samples
                learner.step(2)
                assert learner.samples == before + (2 if distributed_after else 4)
                assert not learner.parameters.flat.any() or not distributed_after
            learner.finish()

    message, _ = errors_of(on_ranks, body)
    assert message.startswith(
        "numbers were not finite 4 times in a row, and at most most_skipped=3 "
    )
    assert message.endswith(" (on rank 1)")
