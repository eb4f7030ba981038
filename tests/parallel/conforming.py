"""The built-in algorithms, each with options for `check_algorithm`, and its exceptions."""

from __future__ import annotations

from dataclasses import replace

from parallel_sgd import (
    DESLOC,
    Adam,
    BlockMomentumSGD,
    CNTKBlockMomentumSGD,
    DataParallelASGD,
    DataParallelSGD,
    DiLoCo,
    ModelAveragingSGD,
    MomentumSGD,
    PowerSGD,
    SlowMo,
    SparseLoCo,
)

OUTER_MOMENTUM = {"serial": "the outer momentum is at work on one rank, too"}
ZEROED = {"serial": "the local momentum is zeroed after every block"}
DRY = "dry_ranks_count_nothing"
ASKING = "announced", "nothing", "dry_ranks", "errors"
TOLD = "needs the samples of all ranks before a step"
LONGER = {DRY: "where others have no samples, one rank's last longer than those that are compared"}
AVERAGED = "the local momenta are averaged, also those of ranks without samples"
ADDED = "the ranks' updates are added, whatever their samples"

CONFORMING = {
    "data-parallel": (DataParallelSGD(), {"optimizer": Adam(lr=0.05)}),
    "data-parallel, 1 bit": (DataParallelSGD(gradient_bits=1, block_size=64), {}),
    "data-parallel, 1/4 bit": (DataParallelSGD(gradient_bits=0.25, block_size=64), {}),
    "data-parallel, changing bits": (
        DataParallelSGD(gradient_bits={0: 4, 20: 16, 60: 2}, block_size=100),
        {"optimizer": MomentumSGD(lr=0.1)},
    ),
    "data-parallel, bits of their own": (
        DataParallelSGD(gradient_bits={0: 4, 20: 1}, bits_of={"b": 32, "<10": 16}, block_size=64),
        {"optimizer": MomentumSGD(lr=0.1)},
    ),
    "data-parallel, warm start": (
        warm := DataParallelSGD(gradient_bits=1, code="sign", block_size=64, distributed_after=20),
        {"one_rank": lambda ranks: replace(warm, distributed_after=-(-20 // ranks))},
    ),
    "PowerSGD": (
        PowerSGD(rank=2, distributed_after=7),
        {"optimizer": MomentumSGD(lr=0.1), "full_precision": PowerSGD(rank=18)},
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
                DRY: AVERAGED,
            },
            "one_rank": lambda ranks: replace(late, overlap_samples=-(-5 // ranks)),
        },
    ),
    "model averaging, 2 bits": (
        ModelAveragingSGD(sync_steps=3, gradient_bits=2, block_size=64),
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
    "DiLoCo, quorum": (
        DiLoCo(sync_steps=3, grace_s=1000),  # long enough for all to be in time
        {"exceptions": OUTER_MOMENTUM | dict.fromkeys(ASKING, TOLD)},
    ),
    "DiLoCo, overlap": (
        overlapping := DiLoCo(sync_steps=3, gradient_bits=4, overlap_samples=5),
        {
            "exceptions": OUTER_MOMENTUM | LONGER,
            "one_rank": lambda ranks: replace(overlapping, overlap_samples=-(-5 // ranks)),
        },
    ),
    "DiLoCo, fragments": (
        streaming := DiLoCo(
            sync_steps=3, fragments=2, block_size=16, gradient_bits=4, overlap_samples=4
        ),
        {
            "exceptions": OUTER_MOMENTUM | LONGER,
            "one_rank": lambda ranks: replace(streaming, overlap_samples=-(-4 // ranks)),
        },
    ),
    "SparseLoCo": (
        SparseLoCo(sync_steps=2, gradient_bits=1, residual_decay=0.5, block_size=16),
        {
            "exceptions": {"owed": "what a message loses decays"},
        },
    ),
    "DES-LOC": (
        DESLOC(sync_steps=1, first_moment_every=2, second_moment_every=4),
        {"optimizer": Adam(lr=0.03), "exceptions": {DRY: AVERAGED}},
    ),
    # Its other modes promise less: see test_parameter_server_conformance.
    "asynchronous, in rounds": (
        DataParallelASGD(mode="sync", servers=0, sync_steps=1, gradient_bits=1, block_size=64),
        {"optimizer": MomentumSGD(lr=0.02)},
    ),
}
