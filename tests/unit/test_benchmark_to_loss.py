"""Seconds to a test loss: steps that are counted once, times the seconds of a step."""

from __future__ import annotations

import math

import pytest
from benchmark_players import GBIT, Players, step_time

from benchmarks.training import tasks
from benchmarks.training.contenders import (
    BEGINNING,
    CONTENDERS,
    PLAIN,
    RECIPE,
    TO_LOSS,
    TO_LOSS_MODULES,
)
from benchmarks.training.step_times import StepTime
from benchmarks.training.summary import Results
from benchmarks.training.to_loss import (
    EVERY,
    MLP_GOAL,
    MOST_STEPS,
    TRANSFORMER_GOAL,
    TUNING_SEED,
    Learned,
    learn,
    learn_all,
    learners_for,
    require_same_step,
    seconds,
    timed_for,
    to_losses,
    tuned,
)
from parallel_sgd import UserError


def _falling(lr, steps):
    """Sooner at the last target the nearer the rate is to 0.4; never from 1.6 on."""
    slow = 1 + abs(math.log2(lr / 0.4))
    return 9.0 if lr > 1 else max(MLP_GOAL.targets[-1], 3 - steps / EVERY / 4 / slow)


@pytest.mark.parametrize("lr", [0.4, 1.6], ids=["gets there", "never"])
def test_a_run_ends_at_the_last_target_or_after_its_steps(lr):
    run = learn(Players({"1 bit": 0.1}, test_loss=_falling), MLP_GOAL, "1 bit", lr, 5, 7 * EVERY)
    assert (run.contender, run.lr, run.seed) == ("1 bit", lr, 5)
    assert run.curve[:2] == [(i * EVERY, _falling(lr, i * EVERY)) for i in (1, 2)]
    if lr == 0.4:
        assert [run.steps_to(target) for target in MLP_GOAL.targets] == [
            3 * EVERY,
            4 * EVERY,
            5 * EVERY,
        ]
        assert run.steps == 5 * EVERY
    else:
        assert run.steps == 7 * EVERY and run.steps_to(MLP_GOAL.targets[0]) == math.inf


def test_a_run_that_diverges_ends():
    players = Players({"1 bit": 0.1}, falls=math.nan, test_loss=_falling)
    run = learn(players, MLP_GOAL, "1 bit", 0.4, 0)
    assert run.curve == [] and run.steps == 0 and len(players.counts) == 1


def test_the_rate_with_the_fewest_steps_is_found_on_a_seed_that_is_not_reported():
    players = Players({"1 bit": 0.1}, test_loss=_falling)
    assert tuned(players, MLP_GOAL, "1 bit") == pytest.approx(0.4)
    rates = [lr / MLP_GOAL.start for _, lr, _ in players.begun]
    assert rates == [1, 2, 0.5, 4, 8]
    assert {seed for *_, seed in players.begun} == {TUNING_SEED}


def test_what_is_known_is_not_learned_again():
    players = Players(dict.fromkeys(CONTENDERS, 0.1), test_loss=_falling)
    known = [Learned("32 bit", 0.2, 0, [(EVERY, 1.9)])]
    runs = learn_all(players, MLP_GOAL, ["32 bit", PLAIN], 2, known)
    assert [(run.contender, run.lr, run.seed) for run in runs] == [
        ("32 bit", 0.2, 0),
        ("32 bit", 0.2, 1),
    ]
    assert players.begun == [("32 bit", 0.2, 1)]  # plain DDP takes the very steps


def test_seconds_to_a_loss_are_those_of_the_steps_to_it():
    assert learners_for([PLAIN, "1 bit", "32 bit"]) == ["32 bit", "1 bit"]
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
    first, second, third = to_losses(MLP_GOAL, PLAIN, GBIT, times, runs, 4)
    assert first.reached and (first.steps, first.seconds) == (16, 16)
    assert second.reached and second.steps == 48  # most were at 2.1
    assert third.reached and third.steps == 48
    never = to_losses(MLP_GOAL, PLAIN, GBIT, times, runs[2:], 4)[2]
    assert not never.reached and never.steps == 48


def test_both_sides_must_begin_alike():
    same = Players(dict.fromkeys(("32 bit", PLAIN), 0.1))
    require_same_step(same, MLP_GOAL)
    same.falls = True
    ask = same.all

    def other(side, command, **options):
        same.falls = 1 if side == "ours" else 1.01
        return ask(side, command, **options)

    same.all = other
    with pytest.raises(UserError, match="both sides must have the same losses"):
        require_same_step(same, MLP_GOAL)


def test_all_that_are_timed_to_a_loss_are_known():
    assert set(TO_LOSS) <= set(CONTENDERS) and MOST_STEPS % EVERY == 0


def test_pytorchs_models_have_a_goal_of_their_own():
    assert set(TO_LOSS_MODULES) <= set(CONTENDERS)
    players = Players({"1 bit": 0.1}, test_loss=lambda lr, steps: 3 - steps / 160)
    run = learn(players, TRANSFORMER_GOAL, "1 bit", 0.4, 0)
    assert players.tasks == [TRANSFORMER_GOAL.task]
    assert run.curve[-1][1] <= TRANSFORMER_GOAL.targets[-1] < run.curve[-2][1]
    times = {
        name: StepTime(TRANSFORMER_GOAL.task, GBIT, name, s, [s], 8, 32 / s, (2.7, 1.0))
        for name, s in (("1 bit", 0.1), ("32 bit, overlap", 0.3))
    }
    results = Results(4, {}, list(times.values()), [run], ["1 bit"], torch=True)
    assert [way.target for way in results.ways()[GBIT]] == list(TRANSFORMER_GOAL.targets)
    assert results.ways()[GBIT][-1].seconds == pytest.approx(0.1 * run.steps)
    known = [Learned("32 bit", 0.4, 0, [(16, 2.0)])]
    (way, *_) = to_losses(TRANSFORMER_GOAL, "32 bit, overlap", GBIT, times, known, 4)
    assert way.reached and way.seconds == pytest.approx(16 * 0.3)
