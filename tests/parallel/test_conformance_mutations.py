"""The conformance suite fails where an algorithm is wrong: every fault is caught by a check."""

from __future__ import annotations

import pytest
import wrong_conduct
import wrong_results
from wrong_results import RANKS, RanksDiffer

from parallel_sgd import DataParallelASGD, DataParallelSGD, DiLoCo, ModelAveragingSGD, MomentumSGD
from parallel_sgd.errors import UserError
from parallel_sgd.testing import CHECKS, check_algorithm

DATA_PARALLEL = DataParallelSGD()
AVERAGING = ModelAveragingSGD(sync_steps=3)
DILOCO = DiLoCo(sync_steps=3)
ROUNDS = DataParallelASGD(mode="sync", servers=0, sync_steps=1)

FAULTS = [*wrong_results.FAULTS, *wrong_conduct.FAULTS]


@pytest.mark.parametrize(
    ("algorithm", "check"),
    [
        pytest.param(algorithm, check, id=f"{type(algorithm).__name__}: {check}")
        for algorithm, checks in FAULTS
        for check in checks
    ],
)
def test_a_fault_is_caught(algorithm, check):
    ranks = 1 if CHECKS[check].alone else RANKS
    with pytest.raises(AssertionError) as caught:
        check_algorithm(algorithm, ranks=(RANKS,), only=[check], timeout_s=0.7)
    said, holds, which, excuses = str(caught.value).split("\n")
    assert said.startswith(f"{check}, on {ranks} rank")
    assert holds == f"  must hold: {CHECKS[check].identity}"
    assert which == f"  {algorithm}"
    assert "exceptions={'check': 'reason'}" in excuses


def test_every_check_catches_something():
    assert {check for _, checks in FAULTS for check in checks} == set(CHECKS)


@pytest.mark.filterwarnings("ignore:servers=0")
def test_the_faultless_pass():
    check_algorithm(DATA_PARALLEL, ranks=(RANKS,), optimizer=MomentumSGD(lr=0.1), schedules=5)
    check_algorithm(AVERAGING, ranks=(RANKS,), schedules=5)
    check_algorithm(
        DILOCO, ranks=(RANKS,), exceptions={"serial": "the outer momentum"}, schedules=5
    )
    check_algorithm(ROUNDS, ranks=(RANKS,), schedules=5)


def test_a_message_names_step_value_and_identity():
    with pytest.raises(AssertionError) as caught:
        check_algorithm(RanksDiffer(), ranks=(2,), only=["agreement"])
    assert str(caught.value).startswith(
        "agreement, on 2 ranks: rank 1: step 0, the shared model, compared with rank 0's: "
    )
    assert "values differ, value " in str(caught.value)


def test_an_error_of_the_algorithm_is_the_cause():
    class Broken(DataParallelSGD):
        def step(self, *arguments):
            raise ZeroDivisionError("division by zero")

    with pytest.raises(
        AssertionError, match=r"^announced, on 2 ranks: ZeroDivisionError: "
    ) as caught:
        check_algorithm(Broken(), ranks=(2,), only=["announced", "permuted", "weights"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert str(caught.value).split("\n")[2] == "permuted, weights: as announced"


@pytest.mark.parametrize("given", [{"ranks": 2}, {"exceptions": ["serial"]}, {"timeout_s": -1}])
def test_wrong_arguments_are_refused(given):
    with pytest.raises(UserError, match=f"^{next(iter(given))}="):
        check_algorithm(DATA_PARALLEL, **given)


@pytest.mark.parametrize(
    ("algorithm", "check", "message"),
    [
        (
            wrong_conduct.own_samples_declared("same"),
            "same_state",
            "rank 1: step 0, algorithm.fragments.0.own_samples, which is "
            'across("same"), is 3, but 0 on rank 0',
        ),
        (
            wrong_conduct.own_samples_declared("same"),
            "resharded",
            "rank 0: stopped after step 3 and resumed on 4 ranks, SharedError: the ranks have "
            "trained on ",
        ),
        (
            wrong_conduct.start_declared("sum"),
            "resharded",
            "rank 0: stopped after step 2 and resumed on 2 ranks, rank 0: the shared model, "
            "compared with that before: ",
        ),
    ],
)
def test_a_message_names_the_field_or_the_ranks(algorithm, check, message):
    with pytest.raises(AssertionError) as caught:
        check_algorithm(algorithm, ranks=(RANKS,), only=[check])
    assert str(caught.value).startswith(f"{check}, on {RANKS} ranks: {message}")
