"""Seconds to a test loss: steps that are counted once, times the seconds of a step."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
from benchmark_players import Players, step_time

from benchmarks.training import tasks, to_loss
from benchmarks.training.contenders import (
    BEGINNING,
    CONTENDERS,
    PLAIN,
    RECIPE,
    TO_LOSS,
    TO_LOSS_MODULES,
)
from benchmarks.training.summary import Results
from benchmarks.training.to_loss import (
    EVERY,
    MOST_STEPS,
    START_LR,
    TUNING_SEED,
    Learned,
    goal_of,
    learn,
    missing_runs,
    seconds,
    timed_for,
    to_losses,
    tuned,
)
from parallel_sgd import Communicator

GOAL, GOAL_OF_MODULES = goal_of(False), goal_of(True)


def _falling(lr, steps):
    """Sooner at the last target the nearer the rate is to 0.4; never from 1.6 on."""
    slow = 1 + abs(math.log2(lr / 0.4))
    return 9.0 if lr > 1 else max(GOAL.targets[-1], 3 - steps / EVERY / 4 / slow)


@pytest.mark.parametrize("lr", [0.4, 1.6], ids=["gets there", "never"])
def test_a_run_ends_at_the_last_target_or_after_its_steps(lr):
    run = learn(Players({"1 bit": 0.1}, test_loss=_falling), GOAL, "1 bit", lr, 5, 7 * EVERY)
    assert (run.contender, run.lr, run.seed) == ("1 bit", lr, 5)
    assert run.curve[:2] == [(i * EVERY, _falling(lr, i * EVERY)) for i in (1, 2)]
    if lr == 0.4:
        assert [run.steps_to(target) for target in GOAL.targets] == [
            3 * EVERY,
            4 * EVERY,
            5 * EVERY,
        ]
        assert run.steps == 5 * EVERY
    else:
        assert run.steps == 7 * EVERY and run.steps_to(GOAL.targets[0]) == math.inf


def test_a_run_that_diverges_ends():
    players = Players({"1 bit": 0.1}, falls=math.nan, test_loss=_falling)
    run = learn(players, GOAL, "1 bit", 0.4, 0)
    assert run.curve == [] and run.steps == 0 and len(players.counts) == 1


def test_the_rate_with_the_fewest_steps_is_found_on_a_seed_that_is_not_reported():
    players = Players({"1 bit": 0.1}, test_loss=_falling)
    assert tuned(players, GOAL, "1 bit") == pytest.approx(0.4)
    rates = [lr / START_LR for _, _, lr, _ in players.begun]
    assert rates == [1, 2, 0.5, 4, 8]
    assert {seed for *_, seed in players.begun} == {TUNING_SEED}


def test_what_is_known_is_not_learned_again(monkeypatch):
    known = [Learned("32 bit", 0.2, 0, [(EVERY, 1.9)])]
    names = ["32 bit", PLAIN, "1 bit"]  # plain DDP takes the very steps of 32 bits
    wanted = missing_runs(names, 2, known)
    assert wanted == [("32 bit", 0.2, [1]), ("1 bit", None, [0, 1])]
    assert missing_runs(["32 bit"], 1, known) == []
    players = Players(dict.fromkeys(CONTENDERS, 0.1), test_loss=_falling)
    monkeypatch.setattr(to_loss, "playing", lambda comm, names, modules: nullcontext(players))
    runs = to_loss.measure(Communicator.single(), wanted, modules=False)
    assert [(run["contender"], run["seed"]) for run in runs] == [
        ("32 bit", 1),
        ("1 bit", 0),
        ("1 bit", 1),
    ]
    assert [run["lr"] for run in runs] == pytest.approx([0.2, 0.4, 0.4])
    assert players.begun[0] == ("32 bit", GOAL.task, 0.2, 1)


def test_seconds_to_a_loss_are_those_of_the_steps_to_it():
    assert timed_for([RECIPE, "1 bit", PLAIN]) == ["4 bit", "1 bit", PLAIN]
    times = {name: step_time(name, s) for name, s in (("4 bit", 0.2), ("1 bit", 0.1), (PLAIN, 1))}
    assert seconds("1 bit", 10, times, 4) == pytest.approx(1)
    for ranks in (2, 4):
        first = BEGINNING / (ranks * tasks.BATCH)
        assert seconds(RECIPE, first, times, ranks) == pytest.approx(0.2 * first)
        assert seconds(RECIPE, first + 30, times, ranks) == pytest.approx(0.2 * first + 3)
    runs = [
        Learned("32 bit", 0.1, seed, [(16, 2.4), (32, 2.2), (48, loss)])
        for seed, loss in enumerate((1.95, 1.9, 2.0))
    ]
    first, second, third = to_losses(GOAL, PLAIN, times, runs, 4)
    assert first.reached and (first.steps, first.seconds) == (16, 16)
    assert second.reached and second.steps == 48  # most were at 2.1
    assert third.reached and third.steps == 48
    never = to_losses(GOAL, PLAIN, times, runs[2:], 4)[2]
    assert not never.reached and never.steps == 48


def test_all_that_are_timed_to_a_loss_are_known():
    assert set(TO_LOSS) <= set(CONTENDERS) and MOST_STEPS % EVERY == 0


def test_pytorchs_models_have_a_goal_of_their_own():
    assert set(TO_LOSS_MODULES) <= set(CONTENDERS)
    players = Players({"1 bit": 0.1}, test_loss=lambda lr, steps: 3 - steps / 160)
    run = learn(players, GOAL_OF_MODULES, "1 bit", 0.4, 0)
    assert [task for _, task, *_ in players.begun] == [GOAL_OF_MODULES.task]
    assert run.curve[-1][1] <= GOAL_OF_MODULES.targets[-1] < run.curve[-2][1]
    times = {
        name: step_time(name, s, GOAL_OF_MODULES.task)
        for name, s in (("1 bit", 0.1), ("32 bit, overlap", 0.3))
    }
    results = Results(4, {}, list(times.values()), [run], ["1 bit"], torch=True)
    assert [way.target for way in results.ways()["1gbit"]] == list(GOAL_OF_MODULES.targets)
    assert results.ways()["1gbit"][-1].seconds == pytest.approx(0.1 * run.steps)
    known = [Learned("32 bit", 0.4, 0, [(16, 2.0)])]
    (way, *_) = to_losses(GOAL_OF_MODULES, "32 bit, overlap", times, known, 4)
    assert way.reached and way.seconds == pytest.approx(16 * 0.3)
