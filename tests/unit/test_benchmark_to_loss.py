"""Seconds to a test loss: steps that are counted once, times the seconds of a step."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
from benchmark_players import Players, step_time

from benchmarks.training import to_loss
from benchmarks.training.contenders import CONTENDERS, PLAIN
from benchmarks.training.summary import Results
from benchmarks.training.to_loss import (
    EVERY,
    START_LR,
    TUNING_SEED,
    Learned,
    goal_of,
    learn,
    missing_runs,
    to_losses,
    tuned,
)
from parallel_sgd import Communicator

GOAL, GOAL_OF_MODULES = goal_of(False), goal_of(True)


def _falling(lr, steps):
    """Sooner at the last target the nearer the rate is to 0.4; never from 1.6 on."""
    slow = 1 + abs(math.log2(lr / 0.4))
    return 9.0 if lr > 1 else max(GOAL.targets[-1], 3 - steps / EVERY / 4 / slow)


def players(**how):
    return Players(dict.fromkeys(CONTENDERS, 0.1), test_loss=_falling, **how)


def test_a_run_ends_at_the_last_target_or_after_its_steps():
    run = learn(players(), GOAL, "1 bit", 0.4, 5, 7 * EVERY)
    assert (run.contender, run.lr, run.seed, run.steps) == ("1 bit", 0.4, 5, 5 * EVERY)
    assert run.curve[:2] == [(i * EVERY, _falling(0.4, i * EVERY)) for i in (1, 2)]
    assert [run.steps_to(target) / EVERY for target in GOAL.targets] == [3, 4, 5]
    never = learn(players(), GOAL, "1 bit", 1.6, 5, 7 * EVERY)
    assert never.steps == 7 * EVERY and never.steps_to(GOAL.targets[0]) == math.inf


def test_a_run_that_diverges_ends():
    diverging = players(falls=math.nan)
    run = learn(diverging, GOAL, "1 bit", 0.4, 0)
    assert run.curve == [] and run.steps == 0 and len(diverging.counts) == 1


def test_the_rate_with_the_fewest_steps_is_found_on_a_seed_that_is_not_reported():
    ranks = players()
    assert tuned(ranks, GOAL, "1 bit") == pytest.approx(0.4)
    assert [lr / START_LR for _, _, lr, _ in ranks.begun] == [1, 2, 0.5, 4, 8]
    assert {seed for *_, seed in ranks.begun} == {TUNING_SEED}


def test_what_is_known_is_not_learned_again(monkeypatch):
    known = [Learned("32 bit", 0.2, 0, [(EVERY, 1.9)])]
    names = ["32 bit", PLAIN, "1 bit"]  # plain DDP takes the very steps of 32 bits
    wanted = missing_runs(names, 2, known)
    assert wanted == [("32 bit", 0.2, [1]), ("1 bit", None, [0, 1])]
    assert missing_runs(["32 bit"], 1, known) == []
    ranks = players()
    monkeypatch.setattr(to_loss, "playing", lambda comm, names, modules: nullcontext(ranks))
    runs = to_loss.measure(Communicator.single(), wanted, modules=False)
    assert [(run["contender"], run["seed"]) for run in runs] == [
        ("32 bit", 1),
        ("1 bit", 0),
        ("1 bit", 1),
    ]
    assert [run["lr"] for run in runs] == pytest.approx([0.2, 0.4, 0.4])


def test_seconds_to_a_loss_are_those_of_the_steps_to_it():
    runs = [
        Learned("32 bit", 0.1, seed, [(16, 2.4), (32, 2.2), (48, loss)])
        for seed, loss in enumerate((1.95, 1.9, 2.0))
    ]
    first, second, third = to_losses(GOAL, PLAIN, 0.5, runs)
    assert first.reached and (first.steps, first.seconds) == (16, 8)
    assert second.reached and second.steps == 48  # most were at 2.1
    assert third.reached and third.steps == 48
    never = to_losses(GOAL, PLAIN, 0.5, runs[2:])[2]
    assert not never.reached and never.steps == 48


def test_pytorchs_models_have_a_goal_of_their_own():
    ranks = Players({"1 bit": 0.1}, test_loss=lambda lr, steps: 3 - steps / 160)
    run = learn(ranks, GOAL_OF_MODULES, "1 bit", 0.4, 0)
    assert [task for _, task, *_ in ranks.begun] == [GOAL_OF_MODULES.task]
    assert run.curve[-1][1] <= GOAL_OF_MODULES.targets[-1] < run.curve[-2][1]
    times = [step_time("1 bit", 0.1, GOAL_OF_MODULES.task)]
    (ways,) = Results(4, {}, times, [run], ["1 bit"], torch=True).ways().values()
    assert [way.target for way in ways] == list(GOAL_OF_MODULES.targets)
    assert ways[-1].seconds == pytest.approx(0.1 * run.steps)
