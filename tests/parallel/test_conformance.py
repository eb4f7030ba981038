"""The built-in algorithms hold what every algorithm must: `parallel_sgd.testing`."""

from __future__ import annotations

import pytest
from cases import few_ranks_but
from conforming import CONFORMING, OUTER_MOMENTUM

from parallel_sgd import DataParallelSGD, ModelAveragingSGD, SlowMo, UserError
from parallel_sgd.algorithms import ALGORITHMS
from parallel_sgd.testing import CHECKS, check_algorithm

#: In the largest world of MPI: one of each way in which ranks communicate.
EVERYWHERE = ("data-parallel, 1 bit", "block momentum", "DiLoCo, overlap")


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.threads(3)
@pytest.mark.parametrize("name", few_ranks_but(EVERYWHERE, CONFORMING))
def test_algorithms_conform(comm, name):
    algorithm, options = CONFORMING[name]
    outcomes = check_algorithm(algorithm, comm=comm, schedules=10, **options)
    assert list(outcomes) == list(CHECKS)
    skipped = [check for check, outcome in outcomes.items() if "passed" not in outcome]
    several = {check for check in CHECKS if CHECKS[check].least_ranks > comm.size}
    assert set(skipped) == several | options.get("exceptions", {}).keys() - several


def test_every_algorithm_of_the_command_line_is_among_them():
    assert {type(algorithm) for algorithm, _ in CONFORMING.values()} == set(ALGORITHMS.values())


@pytest.mark.parametrize("check", CHECKS)
def test_one_check_alone_on_threads(check):
    assert list(check_algorithm(DataParallelSGD(), ranks=(1, 2), only=[check], schedules=20)) == [
        check
    ]


def test_what_is_not_checked_is_said():
    algorithm = SlowMo(sync_steps=3)
    outcomes = check_algorithm(
        algorithm, ranks=(1,), only=["serial", "permuted"], exceptions=OUTER_MOMENTUM
    )
    assert outcomes == {
        "serial": "exception: the outer momentum is at work on one rank, too",
        "permuted": "needs 2 ranks",
    }


def test_an_exception_that_is_not_needed():
    message = (
        r"^permuted passes on 2, 3 ranks: remove its exception \(who knows\)"
        r"\n  DataParallelSGD\(.*\)$"
    )
    with pytest.raises(AssertionError, match=message):
        check_algorithm(
            DataParallelSGD(),
            ranks=(1, 2, 3),
            only=["permuted"],
            exceptions={"permuted": "who knows"},
        )


def test_a_block_that_never_ends():
    message = "^bytes_sent, on 2 ranks: rank 0: no bytes are counted in 10 minibatches"
    with pytest.raises(AssertionError, match=message):
        check_algorithm(ModelAveragingSGD(), only=["bytes_sent"])


@pytest.mark.parametrize("options", [{"only": ["speed"]}, {"exceptions": {"speed": "slow"}}])
def test_a_check_that_does_not_exist(options):
    with pytest.raises(UserError, match=r"^'speed' must be a check: one of options, state, "):
        check_algorithm(DataParallelSGD(), **options)
