"""The benchmark of training beside PyTorch: contenders, rounds, and what is reported."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from benchmark_players import GBIT, Players, options_of, step_time

from benchmarks.training import command as training
from benchmarks.training import step_times as stepping
from benchmarks.training import summary, tasks
from benchmarks.training.contenders import CONTENDERS, HOOKS, PERIOD, PLAIN, TIMED
from benchmarks.training.to_loss import Learned
from benchmarks.training.turns import Ranks
from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.models import MLP, ByteLanguageModel

ALONE = Ranks(Communicator.single())


@pytest.fixture
def small(monkeypatch):
    """A task of each kind that takes no time."""
    mlp = tasks.Task("small", partial(MLP, [784, 8, 10], seed=1), tasks.TASKS["5M"].minibatches)
    text = tasks.Task(
        "text",
        partial(ByteLanguageModel, 8, 4, [16], seed=1),
        tasks.TASKS["bytes"].minibatches,
        tasks.TASKS["bytes"].test,
    )
    monkeypatch.setitem(tasks.TASKS, "small", mlp)
    monkeypatch.setitem(tasks.TASKS, "text", text)


def test_models_have_about_as_many_parameters_as_they_are_called():
    for name, task in tasks.MODELS.items():
        sizes = [int(part) for part in task.title.removeprefix("MLP ").split("-")]
        count = sum((a + 1) * b for a, b in pairwise(sizes))
        assert count == pytest.approx(float(name.removesuffix("M")) * 1e6, rel=0.1)


def test_minibatches_repeat_and_differ_between_ranks():
    x, y = tasks.TASKS["5M"].minibatches(0, 4, 1)
    again, _ = tasks.TASKS["5M"].minibatches(0, 4, 1)
    other, _ = tasks.TASKS["5M"].minibatches(1, 4, 1)
    assert x.shape == (tasks.SYNTHETIC, tasks.BATCH, tasks.INPUTS) and y.shape == x.shape[:2]
    assert np.array_equal(x, again) and not np.array_equal(x, other)
    assert set(y.ravel()) == set(range(tasks.CLASSES))


def test_ranks_share_the_bytes_that_one_rank_would_have(monkeypatch):
    monkeypatch.setattr(tasks, "STEPS", 3)
    parts = [tasks.TASKS["bytes"].minibatches(rank, 2, 7) for rank in range(2)]
    monkeypatch.setattr(tasks, "STEPS", 6)
    x, y = tasks.TASKS["bytes"].minibatches(0, 1, 7)
    assert np.array_equal(np.stack([part[0] for part in parts], 1).reshape(x.shape), x)
    assert np.array_equal(np.stack([part[1] for part in parts], 1).reshape(y.shape), y)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", [name for name in TIMED if CONTENDERS[name].ours])
def test_our_contenders_learn_and_end_with_one_model(name):
    def rank(comm):
        with Ranks(comm).training(name, "small", 0.002) as turn:
            seconds, losses = turn.steps(2 * PERIOD)
            return seconds, losses, turn.same_model()

    (seconds, losses, same), others = simulate(2, rank)
    assert others == (seconds, losses, same)
    assert seconds > 0 and losses[-1] < losses[0]
    assert same == (CONTENDERS[name].period > 0)


@pytest.mark.usefixtures("small")
def test_the_test_loss_falls():
    with ALONE.training("no exchange", "text", 0.05) as turn:
        first = turn.test_loss()
        turn.steps(100)
        assert turn.test_loss() < first - 0.5
    assert not hasattr(turn, "trainer")


def test_the_seconds_of_a_step_are_the_median_of_rounds():
    players = Players({"1 bit": 0.1, PLAIN: 0.4})
    ours, ddp = stepping.measure_steps(players, "5M", GBIT, ["1 bit", PLAIN], rounds=2)
    assert ours.seconds == pytest.approx(0.1) and ddp.seconds == pytest.approx(0.4)
    assert ours.steps == 20 and ddp.steps == 8 and len(ours.rounds) == 2
    assert ours.losses[1] < ours.losses[0]
    assert [name for name, *_ in players.begun] == 2 * ["1 bit", PLAIN]


@pytest.mark.parametrize(
    ("estimate", "period", "steps"), [(0.05, 1, 40), (1, 1, 8), (5, 1, 4), (14, 1, 3), (1, 16, 16)]
)
def test_how_many_steps_are_measured(estimate, period, steps):
    assert stepping.steps_for(estimate, period) == steps


def test_who_trains_alone_for_a_while_is_measured_in_whole_periods():
    players = Players({"block momentum": 0.1})
    stepping.measure_steps(players, "5M", GBIT, ["block momentum"], rounds=1)
    assert all(count % PERIOD == 0 for count in players.counts)


def test_who_does_not_learn_or_agree_is_refused():
    with pytest.raises(UserError, match="1 bit does not learn: loss 3"):
        stepping.measure_steps(Players({"1 bit": 0.1}, falls=False), "5M", GBIT, ["1 bit"], 1)
    apart = Players({"1 bit": 0.1, "no exchange": 0.1}, same=False)
    with pytest.raises(UserError, match="1 bit: all ranks must have the same model"):
        stepping.measure_steps(apart, "5M", GBIT, ["1 bit"], 1)
    stepping.measure_steps(apart, "5M", GBIT, ["no exchange"], 1)


@pytest.fixture
def results():
    seconds = {"1 bit": 0.05, "no exchange": 0.04, PLAIN: 0.3, HOOKS[0]: 0.2, HOOKS[1]: 0.15}
    times = [
        step_time(name, step_s, "5M", rate)
        for rate in (GBIT, math.inf)
        for name, step_s in seconds.items()
    ]
    times += [step_time("1 bit", 0.05), step_time(PLAIN, 0.3), step_time(HOOKS[0], 0.2)]
    runs = [
        Learned("1 bit", 0.1, 0, [(64, 3.0), (128, 1.9)]),
        Learned("32 bit", 0.1, 0, [(64, 2.0), (96, 1.9)]),
        Learned(HOOKS[0], 0.1, 0, [(32, 3.0)]),
    ]
    return summary.Results(4, {"cores": 2}, times, runs, ["1 bit", PLAIN, HOOKS[0]])


def test_results_are_read_as_they_were_written(results, tmp_path, capsys):
    path = tmp_path / "training.json"
    summary.Summary(results).write(path)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # no Infinity
    assert summary.read(str(path)).times == results.times
    training.read(options_of(f"training --table {path}")).print()
    lines = re.sub(" +", " ", capsys.readouterr().out).splitlines()
    assert lines[0] == "| 5M parameters | 1 Gbit/s | unlimited |"
    assert "| 1 bit | 0.050 s, 6.0\N{MULTIPLICATION SIGN} |" in lines[2]
    assert lines[4].startswith(f"| {PLAIN} | 0.300 s |")
    assert lines[-6].startswith(
        "| seconds to a loss | steps to 2.4, 2.1, 1.95 nats | 1 Gbit/s: 2.4 |"
    )
    assert lines[-4].startswith("| 1 bit | 128, 128, 128 | 6.4 s, 3.0\N{MULTIPLICATION SIGN} |")
    assert lines[-2] == f"| {HOOKS[0]} | never, never, never | never | never | never |"


def test_figures(results, tmp_path):
    pytest.importorskip("matplotlib")
    summary.Summary(results).draw(tmp_path / "training.png")
    assert [path.name for path in tmp_path.iterdir()] == ["training-to-loss.png"]
    summary.Summary(replace(results, to_loss=())).draw(tmp_path / "training.png")
    assert {"training-5M.png", "training-bytes.png"} < {path.name for path in tmp_path.iterdir()}


def test_pytorch_that_is_missing(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match="needs PyTorch, which is not installed"):
        training.main(options_of("training"))


COST = {"model": "5M", "seconds": 0.3, "plain_seconds": 0.2, "ddp_seconds": 0.25, "steps": 4}
MEMORY = {"model": "5M", "contender": "DDP", "before_bytes": 1 << 20, "peak_bytes": 3 << 20}
RUN = {"contender": "1 bit", "lr": 0.1, "seed": 0, "curve": [(16, 1.5)]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--torch --here -n 2 --own-cost --memory --models 5M --only '1 bit' --rounds 1",
            [
                (1, "own_cost", {"model": "5M"}),
                (1, "own_cost", {"model": tasks.MANY}),
                (2, "memory", {"model": "5M", "name": "1 bit"}),
                (2, "step_times", {"models": ["5M"], "rate": math.inf, "modules": True}),
            ],
        ),
        (
            "--to-loss --only '1 bit' --seeds 1 --rate 1gbit 100mbit",
            [
                ((4, math.inf), "to_loss", {"wanted": [("1 bit", None, [0])], "modules": False}),
                ((4, 1e9), "step_times", {"models": ["bytes"], "rate": 1e9, "names": ["1 bit"]}),
                ((4, 1e8), "step_times", {"rate": 1e8, "rounds": 3}),
            ],
        ),
    ],
    ids=["here", "to loss"],
)
def test_which_ranks_are_asked(monkeypatch, capsys, line, expected):
    asked = []

    def answer(where, function, options, environ, **_):
        name = function.removeprefix("training.")
        asked.append((where, name, options))
        assert environ["OMP_NUM_THREADS"] == "1"
        times = [
            vars(step_time("1 bit", 0.1, m, options["rate"])) for m in options.get("models", ())
        ]
        return {"own_cost": COST, "memory": MEMORY, "to_loss": [RUN], "step_times": times}[name]

    def on_hosts(count, rate, function, options, **how):
        return answer((count, rate), function, options, **how)

    monkeypatch.setattr(training, "on_ranks", answer)
    monkeypatch.setattr(training, "on_hosts", on_hosts)
    training.main(options_of(f"training {line}")).print()
    assert len(asked) == len(expected)
    for (*place, options), (*wanted, some) in zip(asked, expected, strict=True):
        assert place == wanted and some.items() <= options.items()
    printed = re.sub(" +", " ", capsys.readouterr().out)
    if "--here" in line:
        assert "| 5M parameters | 0.200 | 0.300, +50% | 0.250, +25% |" in printed
        assert "| MiB added to a rank | 5M parameters |" in printed and "| DDP | 2 |" in printed
    else:
        assert "| 1 bit | 16, 16, 16 | 1.6 s |" in printed


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("--hosts 1", "hosts=1 must be at least 2"),
        ("--to-loss --only '8 bit'", "'8 bit' must be one of"),
        ("--runs a.json", "--runs a.json goes with --to-loss"),
        ("--models transformer", "goes with --torch"),
        ("--only 'our hook, 1 bit'", "goes with --torch"),
        ("--only '8 bit, overlap'", "goes with --torch"),
        ("--own-cost", "--own-cost goes with --torch"),
        ("--memory", "--memory goes with --torch"),
    ],
)
def test_options_that_say_nothing_together(line, wrong):
    with pytest.raises(UserError, match=wrong):
        training.main(options_of(f"training {line}"))
