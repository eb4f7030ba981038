"""The benchmark of training beside PyTorch: contenders, rounds, and what is reported."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
import pytest
from benchmark_players import Players, options_of, require_fit, step_time

from benchmarks.report import load
from benchmarks.training import command as training
from benchmarks.training import step_times as stepping
from benchmarks.training import summary, tasks
from benchmarks.training.contenders import CONTENDERS, PERIOD, PLAIN, names_for
from benchmarks.training.to_loss import Learned
from benchmarks.training.turns import Ranks
from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.command_line.units import bits_per_s, rate_text
from parallel_sgd.models import MLP, ByteLanguageModel

TIMES = "\N{MULTIPLICATION SIGN}"
HOOK = "DDP, fp16"


@pytest.fixture
def small(monkeypatch):
    """A task of each kind that takes no time."""
    mlp, text = tasks.TASKS["5M"], tasks.TASKS["bytes"]
    model = partial(ByteLanguageModel, 8, 4, [16], seed=1)
    mlp = replace(mlp, model=partial(MLP, [784, 8, 10], seed=1))
    monkeypatch.setitem(tasks.TASKS, "small", mlp)
    monkeypatch.setitem(tasks.TASKS, "text", replace(text, model=model))


def test_minibatches_repeat_and_differ_between_ranks():
    x, y = tasks.TASKS["5M"].minibatches(0, 4, 1)
    again, _ = tasks.TASKS["5M"].minibatches(0, 4, 1)
    other, _ = tasks.TASKS["5M"].minibatches(1, 4, 1)
    assert x.shape == (tasks.SYNTHETIC, tasks.BATCH, tasks.INPUTS) and y.shape == x.shape[:2]
    assert np.array_equal(x, again) and not np.array_equal(x, other)
    assert set(y.ravel()) == set(range(tasks.CLASSES))


@pytest.mark.parametrize("name", ["_bytes", "_sequences"])
def test_ranks_share_the_samples_that_one_rank_would_have(name):
    of = getattr(tasks, name)
    both = zip(*(of(3, rank, 2, 7) for rank in range(2)), strict=True)
    for parts, whole in zip(both, of(6, 0, 1, 7), strict=True):
        assert np.array_equal(np.stack(parts, 1).reshape(whole.shape), whole)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "name", [name for name in names_for(False, False) if CONTENDERS[name].ours]
)
def test_our_contenders_learn_and_end_with_one_model(name):
    def rank(comm):
        with Ranks(comm).training(name, "small", 0.002) as turn:
            seconds, losses = turn.steps(2 * PERIOD)
            return seconds, losses, turn.same_model()

    (seconds, losses, same), others = simulate(2, rank)
    assert others == (seconds, losses, same)
    assert seconds > 0 and losses[-1] < losses[0]
    assert same == CONTENDERS[name].meets


@pytest.mark.usefixtures("small")
def test_the_test_loss_falls():
    with Ranks(Communicator.single()).training("no exchange", "text", 0.05) as turn:
        first = turn.test_loss()
        turn.steps(100)
        assert turn.test_loss() < first - 0.5
    assert not hasattr(turn, "trainer")


def test_the_seconds_of_a_step_are_the_median_of_rounds():
    players = Players({"block momentum, 1 bit": 0.1, PLAIN: 0.4})
    names = ["block momentum, 1 bit", PLAIN]
    ours, ddp = stepping.measure_steps(players, "5M", names, rounds=2)
    assert (ours["model"], ours["contender"]) == ("5M", names[0])
    assert ours["seconds"] == pytest.approx(0.1) and ddp["rounds"] == pytest.approx([0.4, 0.4])
    assert [name for name, *_ in players.begun] == 2 * names
    assert players.counts[:6] == [PERIOD, PERIOD, 2 * PERIOD, 3, 1, 8]  # of whole periods


@pytest.mark.parametrize(
    ("estimate", "period", "steps"), [(0.05, 1, 40), (1, 1, 8), (5, 1, 4), (14, 1, 3), (1, 16, 16)]
)
def test_how_many_steps_are_measured(estimate, period, steps):
    assert stepping.steps_for(estimate, period) == steps


def test_who_does_not_learn_or_agree_is_refused():
    how = {"model": "5M", "rounds": 1}
    with pytest.raises(UserError, match="1 bit does not learn: loss 3"):
        stepping.measure_steps(Players({"1 bit": 0.1}, falls=False), names=["1 bit"], **how)
    apart = Players({"1 bit": 0.1, "no exchange": 0.1}, same=False)
    with pytest.raises(UserError, match="1 bit: all ranks must have the same model"):
        stepping.measure_steps(apart, names=["1 bit"], **how)
    stepping.measure_steps(apart, names=["no exchange"], **how)


@pytest.fixture
def results():
    seconds = {"1 bit": 0.05, "no exchange": 0.04, PLAIN: 0.3, HOOK: 0.2}
    times = [
        step_time(name, step_s, model, rate)
        for model, rate in (("5M", "1gbit"), ("5M", "unlimited"), ("bytes", "1gbit"))
        for name, step_s in seconds.items()
    ]
    runs = [
        Learned("1 bit", 0.1, 0, [(64, 3.0), (128, 1.9)]),
        Learned("32 bit", 0.1, 0, [(64, 2.0), (96, 1.9)]),
        Learned(HOOK, 0.1, 0, [(32, 3.0)]),
    ]
    return summary.Results(4, {"cores": 2}, times, runs, ["1 bit", PLAIN, HOOK])


def test_results_are_read_as_they_were_written(results, tmp_path, capsys):
    path = tmp_path / "training.json"
    summary.Summary(results).write(path)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # no Infinity
    assert load(path, summary.Results).times == results.times
    training.read(options_of(f"training --table {path}")).print()
    lines = re.sub(" +", " ", capsys.readouterr().out).splitlines()
    assert lines[0] == "| 5M | 1gbit | unlimited |"
    assert f"| 1 bit | 0.050 s, 6.0{TIMES} |" in lines[2]
    assert lines[4].startswith(f"| {PLAIN} | 0.300 s |")
    assert lines[-6].startswith("| seconds to a loss | steps to 2.4, 2.1, 1.95 nats | 1gbit: 2.4 |")
    assert lines[-4].startswith(f"| 1 bit | 128, 128, 128 | 6.4 s, 3.0{TIMES} |")
    assert lines[-2] == f"| {HOOK} | never, never, never | never | never | never |"


def test_figures(results, tmp_path):
    pytest.importorskip("matplotlib")
    summary.Summary(results).draw(tmp_path / "training.png")
    summary.Summary(results, bars=True).draw(tmp_path / "seconds.png")
    drawn = ["seconds.png", "training-to-loss.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == drawn
    with pytest.raises(UserError, match="--figure goes with --to-loss"):
        summary.Summary(replace(results, to_loss=())).draw(tmp_path / "training.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == drawn


COST = {"model": "5M", "seconds": 0.3, "plain_seconds": 0.2, "ddp_seconds": 0.25, "steps": 4}
MEMORY = {"model": "5M", "contender": "DDP", "before_bytes": 1 << 20, "peak_bytes": 3 << 20}
RUN = {"contender": "1 bit", "lr": 0.1, "seed": 0, "curve": [(16, 1.5)]}


@pytest.mark.parametrize(
    ("line", "expected", "printed"),
    [
        (
            "--torch --here -n 2 --own-cost --memory --models 5M --only '1 bit' --rounds 1",
            [
                (1, "costs:measure_own", {"model": "5M"}),
                (1, "costs:measure_own", {"model": tasks.MANY}),
                (2, "costs:measure_memory", {"model": "5M", "name": "1 bit"}),
                (2, "step_times", {"models": ["5M"], "modules": True}),
            ],
            ["| 5M | 0.200 | 0.300, +50% | 0.250, +25% |", "| DDP | 2 |"],
        ),
        (
            "--to-loss --only '1 bit' --seeds 1 --rate 1gbit 100mbit",
            [
                ((4, inf), "to_loss", {"wanted": [("1 bit", None, [0])], "modules": False}),
                ((4, 1e9), "step_times", {"models": ["bytes"], "rounds": 3}),
                ((4, 1e8), "step_times", {"names": ["1 bit"]}),
            ],
            ["| 1 bit | 16, 16, 16 | 1.6 s |"],
        ),
    ],
    ids=["here", "to loss"],
)
def test_which_ranks_are_asked(monkeypatch, capsys, line, expected, printed):
    asked = []

    def answer(where, function, options, environ, **_):
        name = function.removeprefix("training.")
        asked.append((where, name, options))
        require_fit(function, options)
        assert environ["OMP_NUM_THREADS"] == "1"
        if name == "step_times":
            how = {"contender": "1 bit", "seconds": 0.1, "rounds": [0.1]}
            return [{"model": model, **how} for model in options["models"]]
        return {"costs:measure_own": COST, "costs:measure_memory": MEMORY, "to_loss": [RUN]}[name]

    def on_hosts(count, rate, function, options, **how):
        return answer((count, rate), function, options, **how)

    monkeypatch.setattr(training, "on_ranks", answer)
    monkeypatch.setattr(training, "on_hosts", on_hosts)
    training.main(options_of(f"training {line}")).print()
    assert len(asked) == len(expected)
    for (*place, options), (*wanted, some) in zip(asked, expected, strict=True):
        assert place == wanted and some.items() <= options.items()
    output = re.sub(" +", " ", capsys.readouterr().out)
    assert all(row in output for row in printed)


def test_rates_are_written_as_they_are_read():
    for text in ("10kbit", "10mbit", "2.5gbit", "1gbit", "unlimited"):
        assert rate_text(bits_per_s(text)) == text


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("--hosts 1", "hosts=1 must be at least 2"),
        ("--to-loss --only 'no exchange'", "'no exchange' must be one of"),
        ("--runs a.json", "--runs a.json goes with --to-loss"),
        ("--models transformer", "goes with --torch"),
        ("--only 'our hook, 1 bit'", "'our hook, 1 bit' must be one of"),
        ("--own-cost", "--own-cost goes with --torch"),
        ("--memory", "--memory goes with --torch"),
        ("", "needs PyTorch, which is not installed"),
    ],
)
def test_what_is_refused(monkeypatch, line, wrong):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match=wrong):
        training.main(options_of(f"training {line}"))
