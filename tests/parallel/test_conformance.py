"""The built-in algorithms hold what every algorithm must: `parallel_sgd.testing`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import few_ranks_but

from parallel_sgd import (
    Adam,
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    DataParallelASGD,
    DataParallelSGD,
    DiLoCo,
    ModelAveragingSGD,
    MomentumSGD,
    SlowMo,
    UserError,
)
from parallel_sgd.algorithms import ALGORITHMS
from parallel_sgd.testing import CHECKS, check_algorithm

OUTER_MOMENTUM = {"serial": "the outer momentum is at work on one rank, too"}
ZEROED = {"serial": "the local momentum is zeroed after every block"}
DRY = "dry_ranks_count_nothing"
LONGER = {DRY: "where others have no samples, one rank's last longer than those that are compared"}
ADDED = "the ranks' updates are added, whatever their samples"

CONFORMING = {
    "data-parallel": (DataParallelSGD(), {"optimizer": Adam(lr=0.05)}),
    "data-parallel, 1 bit": (DataParallelSGD(gradient_bits=1, block_size=64), {}),
    "data-parallel, changing bits": (
        DataParallelSGD(gradient_bits={0: 4, 20: 16, 60: 2}, block_size=100),
        {"optimizer": MomentumSGD(lr=0.1)},
    ),
    "data-parallel, warm start": (
        warm := DataParallelSGD(gradient_bits=1, block_size=64, distributed_after=20),
        {"one_rank": lambda ranks: replace(warm, distributed_after=-(-20 // ranks))},
    ),
    "model averaging": (
        ModelAveragingSGD(sync_period=6),
        {"optimizer": MomentumSGD(lr=0.1)},
    ),
    "model averaging, overlap": (
        late := ModelAveragingSGD(sync_steps=3, overlap_samples=5, inner_state="average"),
        {
            "optimizer": MomentumSGD(lr=0.1),
            "exceptions": {
                "serial": "merging takes back half of the steps during the exchange",
                DRY: "the local momenta are averaged, also those of ranks without samples",
            },
            "one_rank": lambda ranks: replace(late, overlap_samples=-(-5 // ranks)),
        },
    ),
    "model averaging, 1 bit": (
        ModelAveragingSGD(sync_steps=3, gradient_bits=1, block_size=64),
        {},
    ),
    "block momentum": (
        block := BlockMomentumSGD(sync_period=6),
        {
            "exceptions": LONGER,
            "one_rank": lambda ranks: replace(block, block_momentum=1 - 1 / ranks),
        },
    ),
    "block momentum, classical": (
        classical := BlockMomentumSGD(
            block_samples=12,
            block_momentum_as_time_constant=30,
            use_nesterov_momentum=False,
            gradient_bits=8,
        ),
        {
            "optimizer": MomentumSGD(lr=0.05),
            "exceptions": OUTER_MOMENTUM | LONGER,
            "one_rank": lambda ranks: replace(
                classical,
                block_samples=-(-12 // ranks),
                block_momentum_as_time_constant=30 / ranks,
            ),
        },
    ),
    "block momentum on local momentum": (
        zeroing := BlockMomentumSGD(sync_steps=2),
        {
            "optimizer": MomentumSGD(lr=0.1),
            "exceptions": ZEROED,
            "one_rank": lambda ranks: replace(zeroing, block_momentum=1 - 1 / ranks),
        },
    ),
    "CNTK's block momentum": (
        cntk := CNTKBlockMomentumSGD(sync_steps=3, block_learning_rate=0.5),
        {
            "exceptions": {"serial": "half of every block's update", "weights": ADDED, DRY: ADDED},
            "one_rank": lambda ranks: replace(
                cntk, block_momentum=1 - 1 / ranks, block_learning_rate=0.5 * ranks
            ),
        },
    ),
    "SlowMo": (SlowMo(sync_steps=3, inner_state="zero"), {"exceptions": OUTER_MOMENTUM}),
    "DiLoCo": (
        DiLoCo(sync_steps=3),
        {"optimizer": Adam(lr=0.03, weight_decay=0.1), "exceptions": OUTER_MOMENTUM},
    ),
    "DiLoCo, overlap": (
        overlapping := DiLoCo(sync_steps=3, gradient_bits=4, overlap_samples=5),
        {
            "exceptions": OUTER_MOMENTUM | LONGER,
            "one_rank": lambda ranks: replace(overlapping, overlap_samples=-(-5 // ranks)),
        },
    ),
    # Its other modes promise less: see test_parameter_server_conformance.
    "asynchronous, in rounds": (
        DataParallelASGD(mode="sync", servers=0, sync_steps=1, gradient_bits=1, block_size=64),
        {"optimizer": MomentumSGD(lr=0.1)},
    ),
}


#: In the largest world of MPI: one of each way in which ranks communicate.
EVERYWHERE = ("data-parallel, 1 bit", "block momentum", "DiLoCo, overlap")


@pytest.mark.filterwarnings("ignore:servers=0")
@pytest.mark.threads(1, 3)
@pytest.mark.parametrize("name", few_ranks_but(EVERYWHERE, CONFORMING))
def test_algorithms_conform(on_ranks, name):
    algorithm, options = CONFORMING[name]

    def body(comm):
        outcomes = check_algorithm(algorithm, comm=comm, **options)
        assert list(outcomes) == list(CHECKS)
        skipped = [check for check, outcome in outcomes.items() if "passed" not in outcome]
        several = {check for check in CHECKS if CHECKS[check].least_ranks > comm.size}
        assert set(skipped) == several | options.get("exceptions", {}).keys() - several

    on_ranks(body)


def test_every_algorithm_of_the_command_line_is_among_them():
    assert {type(algorithm) for algorithm, _ in CONFORMING.values()} == set(ALGORITHMS.values())


@pytest.mark.parametrize("check", CHECKS)
def test_one_check_alone_on_threads(check):
    assert list(check_algorithm(DataParallelSGD(), ranks=(1, 2), only=[check])) == [check]


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
        r"^permuted passes on 2, 3 ranks, so it needs no exception \(who knows\)"
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
    message = "^bytes_sent, on 2 ranks: rank 0: nothing was sent in 10 minibatches"
    with pytest.raises(AssertionError, match=message):
        check_algorithm(ModelAveragingSGD())


@pytest.mark.parametrize("options", [{"only": ["speed"]}, {"exceptions": {"speed": "slow"}}])
def test_a_check_that_does_not_exist(options):
    with pytest.raises(UserError, match=r"^'speed' must be a check: one of options, state, "):
        check_algorithm(DataParallelSGD(), **options)
