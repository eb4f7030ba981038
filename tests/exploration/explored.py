"""All configurations to explore: a program, its faults, and what must hold at its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from explored_serving import ServingCheck, adding, few_bits, rows_of_a_table, saving_rows
from explored_sessions import PROBLEM, SAMPLES, ending, session
from explored_training import (
    GoingBack,
    TrainingCheck,
    agreeing_before,
    check_in_turn,
    in_turn,
    loop_of_its_own,
    saving,
    training,
)

import parallel_sgd as psgd
from parallel_sgd.communication import Communicator
from parallel_sgd.communication.job_environment import PREEMPT_ON
from parallel_sgd.testing import Exploration, Outcome, explore

Program = Callable[[Communicator], Any]
Check = Callable[[Outcome], object]


@dataclass(frozen=True)
class Configuration:
    """A program with its faults.

    Args:
        make: returns the program, and the check of its outcomes.
        options: of `explore`.
    """

    make: Callable[[], tuple[Program, Check]]
    options: dict[str, Any]

    def explore(self, **options: Any) -> Exploration:
        program, check = self.make()
        with mock.patch.dict(os.environ, {PREEMPT_ON: "USR1"}):  # else nobody asks for notices
            return explore(program, check=check, **(self.options | options))


def learner(
    algorithm: Any, optimizer: Any = None, dtype: str = "float64", **given: Any
) -> Configuration:
    """Training with an algorithm, by a learner."""
    of_check = {name: given.pop(name) for name in ("same", "exact", "near") if name in given}
    of_check["ahead"] = 1 if algorithm.synchronizes_every_step else 4
    of_explore = {
        name: given.pop(name)
        for name in ("ranks", "faults", "spares", "kinds", "may_fail")
        if name in given
    }
    return Configuration(
        lambda: (training(algorithm, optimizer, dtype, **given), TrainingCheck(**of_check)),
        {"ranks": 4, "faults": 2, "may_fail": False} | of_explore,
    )


def served(program: Program, servers: int, check: dict[str, Any], **options: Any) -> Configuration:
    """Training with servers, the last ranks, or 0: every rank serves."""
    ranks = options.get("ranks", 4)
    return Configuration(
        lambda: (program, ServingCheck(workers=ranks - servers, **check)),
        {"ranks": ranks, "faults": 2} | options,
    )


def pushes(servers: int, check: dict[str, Any] | None = None, **given: Any) -> Configuration:
    """Workers that add, each a number of its own."""
    options = {name: given.pop(name) for name in ("ranks", "faults", "spares") if name in given}
    of_program = {name: given.pop(name) for name in ("gathers", "surviving") if name in given}
    algorithm = psgd.DataParallelASGD(servers=servers, **({"sync_steps": 1} | given))
    checks = {"exact": True} if check is None else check
    program = adding(algorithm, warm=checks.get("warm", 0), **of_program)
    return served(program, servers, checks, **options)


SYNC, MOMENTUM = psgd.DataParallelSGD, psgd.MomentumSGD(lr=0.01)
GROWING = psgd.schedules.Steps({0: 0.05, SAMPLES: 50.0})
"""The model becomes worse half-way."""
LATER = range(54, 2 * SAMPLES)  #: samples from the tenth step on
PATIENT = {"patience": 1, "restore_best": True}
REDUCE = psgd.NotFinitePolicy(not_finite="reduce", not_finite_keep_every=12)
AUTO_RATE = psgd.AutoLearningRate(reduce_learn_rate_if_improve_less_than=0.01)
AUTO_SIZE = psgd.AutoMinibatchSize(minibatch_size_tuning_max=12, trial_samples=24)
LONG_TRIALS = psgd.AutoMinibatchSize(minibatch_size_tuning_max=12, trial_samples=100)
ENDING_RATE = psgd.AutoLearningRate(reduce_learn_rate_if_improve_less_than=0.9, min_learn_rate=0.04)
LIMITED_RATE = psgd.AutoLearningRate(learn_rate_adjust_interval=2, min_learn_rate=10.0)

CONFIGURATIONS: dict[str, Configuration] = {
    "sync": learner(SYNC(), MOMENTUM, exact=True),
    "sync, constant": learner(SYNC(), constant=True, exact=True),
    "sync, a loop of its own": Configuration(
        lambda: (loop_of_its_own(SYNC()), TrainingCheck(exact=True)),
        {"ranks": 4, "faults": 2, "may_fail": False},
    ),
    "sync, compared": learner(SYNC(), MOMENTUM, exact=True, compares=True),
    "sync, compared, spare": learner(SYNC(), MOMENTUM, exact=True, compares=True, spares=1),
    "sync, surviving": learner(SYNC(), MOMENTUM, exact=True, compares=True, surviving=True),
    "sync, surviving, spare": learner(
        SYNC(), MOMENTUM, exact=True, compares=True, surviving=True, spares=1
    ),
    "sync, agreed before, spare": Configuration(
        lambda: (agreeing_before(training(SYNC(), MOMENTUM)), TrainingCheck(exact=True)),
        {"ranks": 4, "faults": 1, "spares": 1},
    ),
    "sync, saves": Configuration(saving, {"ranks": 3, "faults": 2, "may_fail": False}),
    "sync, saves, spare": Configuration(
        saving, {"ranks": 3, "faults": 1, "spares": 1, "may_fail": False}
    ),
    "sync, goes back": Configuration(
        partial(saving, GoingBack), {"ranks": 3, "faults": 2, "may_fail": False}
    ),
    "two learners": Configuration(
        lambda: (in_turn(SYNC(), psgd.ModelAveragingSGD(sync_steps=2)), check_in_turn),
        {"ranks": 3, "faults": 1},
    ),
    "two learners, every rank serves": Configuration(
        lambda: (
            in_turn(SYNC(), psgd.DataParallelASGD(servers=0, sync_steps=1, min_block=10)),
            check_in_turn,
        ),
        {"ranks": 3, "faults": 1},
    ),
    "sync, ahead": learner(SYNC(), MOMENTUM, exact=True, ahead=True),
    "sync, spare": learner(SYNC(), MOMENTUM, exact=True, spares=1),
    "sync, 2 spares, 3 faults": learner(SYNC(), MOMENTUM, exact=True, spares=2, faults=3),
    "sync, 2 ranks": learner(SYNC(), MOMENTUM, exact=True, ranks=2, faults=1, spares=1),
    "sync, statistics": learner(SYNC(), MOMENTUM, exact=True, reports=True),
    "sync, committed each step": learner(SYNC(), MOMENTUM, exact=True, commit_every=1),
    "sync, pipelined": learner(SYNC(transport="pipelined"), MOMENTUM, exact=True),
    "sync, overlap": learner(SYNC(overlap=True), MOMENTUM, exact=True),
    "sync, no failures": learner(SYNC(), MOMENTUM, exact=True, faults=0),
    "adam": learner(SYNC(), psgd.Adam(lr=0.01), near=0.7),
    "8 bits": learner(SYNC(gradient_bits=8), dtype="float32"),
    "4 bits, overlap": learner(SYNC(gradient_bits=4, overlap=True), dtype="float32"),
    "8 bits, double buffering": learner(
        SYNC(gradient_bits=8, double_buffering=True), dtype="float32"
    ),
    "2 bits, entropy, pipelined": learner(
        SYNC(gradient_bits=2, code="entropy", transport="pipelined"), dtype="float32"
    ),
    "1 bit": learner(SYNC(gradient_bits=1), dtype="float32", near=2.0),
    "1 bit, sign, spare": learner(
        SYNC(gradient_bits=1, code="sign", block_size=64), dtype="float32", spares=1, near=2.0
    ),
    "1 bit, no failures": learner(SYNC(gradient_bits=1), dtype="float32", faults=0),
    "PowerSGD": learner(psgd.PowerSGD(rank=2), dtype="float32"),
    "model averaging": learner(psgd.ModelAveragingSGD(sync_steps=2)),
    "model averaging, spare": learner(psgd.ModelAveragingSGD(sync_steps=3), spares=1),
    "model averaging, compared": learner(psgd.ModelAveragingSGD(sync_steps=3), compares=True),
    "model averaging, samples": learner(psgd.ModelAveragingSGD(sync_period=2)),
    "block momentum": learner(psgd.BlockMomentumSGD(sync_steps=3)),
    "block momentum, overlap, 8 bits": learner(
        psgd.BlockMomentumSGD(sync_steps=4, overlap_samples=6, gradient_bits=8), dtype="float32"
    ),
    "SlowMo": learner(psgd.SlowMo(sync_steps=2)),
    "SlowMo, 1 bit": learner(
        psgd.SlowMo(sync_steps=3, gradient_bits=1, block_size=64), dtype="float32", near=2.0
    ),
    "DiLoCo": learner(psgd.DiLoCo(sync_steps=4), psgd.Adam(lr=0.01)),
    "DiLoCo, overlap": learner(psgd.DiLoCo(sync_steps=4, overlap_samples=6), psgd.Adam(lr=0.01)),
    "DiLoCo, fragments": learner(
        psgd.DiLoCo(sync_steps=4, fragments=2, block_size=4), psgd.Adam(lr=0.01)
    ),
    "DiLoCo, fragments, overlap, spare": learner(
        psgd.DiLoCo(sync_steps=4, fragments=2, block_size=4, overlap_samples=1000, gradient_bits=4),
        psgd.Adam(lr=0.01),
        dtype="float32",
        spares=1,
    ),
    "SparseLoCo": learner(
        psgd.SparseLoCo(sync_steps=3, block_size=16), psgd.Adam(lr=0.01), dtype="float32", near=2.0
    ),
    "DES-LOC": learner(
        psgd.DESLOC(sync_steps=2, first_moment_every=2, second_moment_every=3),
        psgd.Adam(lr=0.01),
    ),
    "DiLoCo, quorum, no failures": learner(
        psgd.DiLoCo(sync_steps=2, quorum=3, gradient_bits=4),
        psgd.Adam(lr=0.01),
        dtype="float32",
        compares=True,
        same=False,
        faults=0,
    ),
    "block momentum, quorum, no failures": learner(
        psgd.BlockMomentumSGD(sync_steps=3, grace_s=0.01), same=False, faults=0
    ),
    "measured shares": learner(SYNC(), measures=True, exact=True, same=False),
    "measured shares, ahead, spare": learner(
        SYNC(), measures=True, ahead=True, exact=True, same=False, spares=1
    ),
    "measured shares, blocks": learner(
        psgd.ModelAveragingSGD(sync_steps=2), measures=True, same=False
    ),
    "servers": pushes(1),
    "servers, spare": pushes(1, spares=1),
    "2 servers": pushes(2, min_block=10),
    "2 servers, spare": pushes(2, min_block=10, spares=1),
    "2 servers, gathered": pushes(2, gathers=True, min_block=10),
    "2 servers, surviving": pushes(2, gathers=True, surviving=True, min_block=10),
    "2 servers, surviving, spare": pushes(2, surviving=True, min_block=10, spares=1),
    "bounded": pushes(2, mode="bounded", staleness=1, min_block=10),
    "updates": pushes(2, sync_steps=2, currency="deltas", min_block=10),
    "geo": pushes(1, sync_steps=3, mode="geo", currency="deltas", merge="sum"),
    "pipeline": pushes(1, pipeline=True),
    "every rank serves": pushes(0, min_block=10),
    "sync rounds": pushes(1, {"rounds": 6}, mode="sync"),
    "sync rounds, 2 servers": pushes(2, {"rounds": 6}, mode="sync", min_block=10),
    "sync rounds of 3 steps": pushes(2, {"rounds": 2}, mode="sync", sync_steps=3, min_block=10),
    "sync rounds, 5 ranks, 3 servers": pushes(3, {"rounds": 6}, mode="sync", min_block=10, ranks=5),
    "sync rounds, 6 ranks, 4 servers": pushes(4, {}, mode="sync", ranks=6),
    "warm start": pushes(1, {"exact": True, "warm": 4}, distributed_after=4),
    "pushes of 8 bits": served(
        few_bits(psgd.DataParallelASGD(servers=2, sync_steps=1, gradient_bits=8, min_block=10)),
        2,
        {},
    ),
    "pushes of 1 bit, pipeline": served(
        few_bits(psgd.DataParallelASGD(servers=2, sync_steps=1, gradient_bits=1, pipeline=True)),
        2,
        {},
    ),
    "rows": served(rows_of_a_table(), 2, {"rows_end": True}),
    "rows, prefetched": served(rows_of_a_table(prefetches=True), 2, {"rows_end": True}),
    "rows, saves": Configuration(saving_rows, {"ranks": 4, "faults": 1, "may_fail": True}),
    **{
        f"session, {name}": Configuration(
            session(SYNC(), **of_session),
            {"ranks": 3, "faults": 2, "kinds": kinds, "spares": spares},
        )
        for name, kinds, spares, of_session in [
            ("ranks", "ranks", 0, {}),
            ("spare", "ranks", 1, {}),
            ("files", "files", 0, {}),
            ("notices", ("notices", "ranks"), 0, {}),
            ("all faults", ("ranks", "files", "notices"), 1, {}),
            ("resumed", ("ranks", "files"), 0, {"resumed": True}),
            (
                "best model",
                "ranks",
                0,
                {"rates": GROWING, "check": {"last": False}},
            ),
        ]
    },
    **{
        f"session, {name}": Configuration(
            session(SYNC(), check, **of_session), {"ranks": 3, "faults": 2, "spares": 1}
        )
        for name, check, of_session in [
            (
                "skip",
                {},
                {"nan_at": (54,), "options": {"not_finite": "skip", "progress_every": 18}},
            ),
            ("reduce", {}, {"nan_at": (54,), "above": 0.6, "options": {"not_finite": REDUCE}}),
            (
                "reduce twice",
                {"exact": False},
                {"nan_at": (54,), "above": 0.3, "options": {"not_finite": REDUCE}},
            ),
            (
                "automatic rate",
                {},
                {"nan_at": (54,), "above": 0.9, "options": {"auto_learning_rate": AUTO_RATE}},
            ),
            (
                "automatic rate, small at last",
                {"last": False},
                {"rates": GROWING, "options": {"auto_learning_rate": LIMITED_RATE}},
            ),
            ("automatic size", {}, {"options": {"auto_minibatch_size": AUTO_SIZE}}),
            ("automatic size, all data", {}, {"options": {"auto_minibatch_size": LONG_TRIALS}}),
            (
                "automatic size, reduce",
                {},
                {
                    "nan_at": (66,),
                    "above": 0.6,
                    "options": {"auto_minibatch_size": AUTO_SIZE, "not_finite": REDUCE},
                },
            ),
            ("ended by a callback", {"last": False}, {"ends_at": 90}),
            (
                "ended by its rate",
                {"last": False},
                {"options": {"auto_learning_rate": ENDING_RATE}},
            ),
            ("ended by patience", {"last": False}, {"validation": PATIENT, "rates": GROWING}),
            ("not validated, resumed", {}, {"resumed": True, "validation": None, "calls": False}),
        ]
    },
    "session, nothing saved": Configuration(  # more ranks are left than are launched here: one
        session(
            SYNC(),
            {"last": False},
            saves=False,
            validation=None,
            options={"started": lambda learner: None},
        ),
        {"ranks": 3, "faults": 1, "spares": 1},
    ),
    **{
        f"session, {name}": Configuration(
            ending(text, algorithm, **given), {"ranks": 4, "faults": 2, "may_fail": may_fail}
        )
        for name, text, algorithm, may_fail, given in [
            ("diverges", "not finite", SYNC(), False, {"nan_at": LATER}),
            ("an infinite loss", "has diverged", SYNC(), False, {"infinite_at": LATER}),
            ("a problem", PROBLEM, SYNC(), False, {"problem_at": LATER}),
            (
                "servers, a problem",
                PROBLEM,
                psgd.DataParallelASGD(servers=1, sync_steps=1),
                True,
                {"problem_at": LATER, "validation": {"restore_best": False}},
            ),
            (
                "sync servers, diverges",
                "not finite",
                psgd.DataParallelASGD(servers=2, sync_steps=1, mode="sync", min_block=1),
                True,
                {"nan_at": LATER},
            ),
        ]
    },
    "session, warm start": Configuration(
        session(psgd.ModelAveragingSGD(sync_steps=4, distributed_after=24), {"exact": False}),
        {"ranks": 3, "faults": 2, "kinds": ("ranks", "files")},
    ),
    "session, sync servers, automatic rate": Configuration(
        session(
            psgd.DataParallelASGD(servers=1, sync_steps=1, mode="sync", currency="deltas"),
            {"exact": False, "rows": False, "last": False},
            rates=GROWING,
            options={"auto_learning_rate": AUTO_RATE},
            calls=False,
        ),
        {"ranks": 4, "faults": 1, "may_fail": True},
    ),
    "session, servers, not validated": Configuration(
        session(
            psgd.DataParallelASGD(servers=1, sync_steps=1),
            {"exact": False, "rows": False},
            validation=None,
            calls=False,
        ),
        {"ranks": 4, "faults": 2, "may_fail": True},
    ),
    "session, servers, warm start": Configuration(
        session(
            psgd.DataParallelASGD(servers=1, sync_steps=1, distributed_after=24),
            {"exact": False, "rows": False},
            validation={},
            calls=False,
        ),
        {"ranks": 4, "faults": 1, "spares": 1, "may_fail": False},
    ),
    "session, model averaging": Configuration(
        session(psgd.ModelAveragingSGD(sync_steps=4), {"exact": False}),
        {"ranks": 3, "faults": 2, "kinds": ("ranks", "files")},
    ),
    "session, every rank serves": Configuration(
        session(
            psgd.DataParallelASGD(servers=0, sync_steps=1, min_block=1),
            {"exact": False},
            validation={"restore_best": False},
        ),
        {"ranks": 3, "faults": 2, "kinds": ("ranks", "files")},
    ),
    **{
        f"session, {name}": Configuration(session(algorithm, check, **given), options)
        for name, algorithm, check, given in [
            (
                "sync servers",
                psgd.DataParallelASGD(servers=2, sync_steps=1, mode="sync", min_block=1),
                {"exact": False, "ranks": (3, 4, 5)},
                {},
            ),
            (
                "servers",
                psgd.DataParallelASGD(servers=1, sync_steps=1),
                {"exact": False},
                {"validation": {"restore_best": False}},
            ),
        ]
        for name, options in [
            (name, {"ranks": 4, "faults": 1, "may_fail": False}),
            (f"{name}, spare", {"ranks": 4, "faults": 1, "spares": 1, "may_fail": False}),
            (f"{name}, files", {"ranks": 4, "faults": 1, "kinds": "files"}),
            (
                f"{name}, all faults",
                {"ranks": 4, "faults": 2, "kinds": ("ranks", "files", "notices"), "spares": 1},
            ),
        ]
    },
}
