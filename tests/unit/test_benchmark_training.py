"""The benchmark of training beside PyTorch: both sides' ranks, the rounds, and what is reported."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_players import GBIT, Players, options_of, step_time

from benchmarks.training import command as training
from benchmarks.training import conductor as conducting
from benchmarks.training import step_times as stepping
from benchmarks.training import summary, tasks
from benchmarks.training.contenders import CONTENDERS, HOOKS, PERIOD, PLAIN, TIMED
from benchmarks.training.member import Member
from benchmarks.training.ours import Ours
from benchmarks.training.step_times import StepTime
from benchmarks.training.to_loss import Learned
from parallel_sgd import Communicator, UserError, simulate
from parallel_sgd.models import MLP, ByteLanguageModel


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
        member = Member(comm.rank, comm.size, lambda *a: Ours(comm, *a), comm.barrier)
        member.begin(name, "small", 0.002)
        return member.steps(2 * PERIOD)

    answers = simulate(2, rank)
    assert all(answer["losses"][-1] < answer["losses"][0] for answer in answers)
    assert len({answer["digest"] for answer in answers}) == (1 if CONTENDERS[name].period else 2)


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, at itself
@pytest.mark.parametrize("task", ["small", "text"])
def test_pytorch_takes_the_very_steps_that_ours_takes(task):
    pytest.importorskip("torch")
    from benchmarks.training.peer import Peer

    sides = {
        "ours": (Ours(Communicator.single(), "no exchange", task, 0.01, 1), "no exchange"),
        "peer": (Peer("PyTorch, no exchange", task, 0.01, 1), "PyTorch, no exchange"),
    }
    trained = {}
    for side, (trainer, name) in sides.items():
        member = Member(0, 1, lambda *a, trainer=trainer: trainer, lambda: None)
        member.begin(name, task, 0.01)
        before = trainer.values().copy()
        trained[side] = (before, member.steps(3)["losses"], trainer.values())
    for ours, theirs in zip(*trained.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small")
def test_the_test_loss_falls():
    learner = Ours(Communicator.single(), "no exchange", "text", 0.05, 1)
    member = Member(0, 1, lambda *a: learner, lambda: None)
    member.begin("no exchange", "text", 0.1)
    first = member.evaluate()["loss"]
    member.steps(100)
    assert member.evaluate()["loss"] < first - 0.5
    member.end()
    assert member.trainer is None


RANK = """
import sys
from benchmarks.training.member import Member
class Fake(Member):
    def begin(self, **options):
        return dict(options, rank=self.rank)
    def steps(self, count):
        return sys.exit("rank 1 has had enough") if self.rank == 1 else dict()
Fake(int(sys.argv[1]), 2, None, None).follow(sys.argv[2], "ours")
"""


def _processes(monkeypatch, *arguments):
    """Let a side be two processes of this machine."""
    monkeypatch.setattr(
        conducting,
        "_commands",
        lambda side, module, hosts, path: [
            [sys.executable, *(a.format(rank=rank, path=path) for a in arguments)]
            for rank in range(2)
        ],
    )
    return SimpleNamespace(names=("a", "b"))


def test_the_conductor_speaks_with_all_ranks_in_their_order(monkeypatch):
    hosts = _processes(monkeypatch, "-c", RANK, "{rank}", "{path}")
    with conducting.conducted(hosts, ["ours"]) as conductor:
        answers = conductor.all("ours", "begin", lr=0.5)
        assert answers == [{"rank": 0, "lr": 0.5}, {"rank": 1, "lr": 0.5}]
        assert conductor.first("ours", "begin") == {"rank": 0}
        with pytest.raises(UserError, match="our ranks ended in steps"):
            conductor.all("ours", "steps", count=1)


def test_a_side_that_does_not_start_is_an_error_and_not_a_hang(monkeypatch):
    hosts = _processes(monkeypatch, "-c", "raise SystemExit(3)")
    starting = conducting.conducted(hosts, ["peer"])
    with pytest.raises(UserError, match="PyTorch's processes did not start"), starting:
        pass


def test_ours_starts_through_the_launcher_and_pytorch_once_on_every_host():
    hosts = SimpleNamespace(
        names=("a", "b"),
        addresses=("1.1.1.1", "1.1.1.2"),
        inside=["in"],
        run_options=["--hostfile", "h"],
        on=lambda i: ["on", str(i)],
    )
    (ours,) = conducting._commands("ours", "benchmarks.training.ours", hosts, "path")
    assert ours[0] == "in" and ours[4:9] == ["run", "-n", "2", "--hostfile", "h"]
    peers = conducting._commands("peer", "benchmarks.training.peer", hosts, "path")
    assert [command[:2] for command in peers] == [["on", "0"], ["on", "1"]]
    assert [ours[-2], peers[0][-5]] == ["benchmarks.training.ours", "benchmarks.training.peer"]
    assert [command[-4:] for command in peers] == [[rank, "2", "1.1.1.1", "path"] for rank in "01"]


def test_a_step_takes_as_long_as_its_slowest_rank():
    players = Players({"1 bit": 0.1, PLAIN: 0.4})
    ours, ddp = stepping.measure_steps(players, "5M", GBIT, ["1 bit", PLAIN], rounds=2)
    assert ours.seconds == pytest.approx(0.1) and ddp.seconds == pytest.approx(0.4)
    assert ours.samples_per_s == pytest.approx(2 * tasks.BATCH / 0.1)
    assert ours.steps == 20 and ddp.steps == 8 and len(ours.rounds) == 2
    assert ours.losses[1] < ours.losses[0]


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
    apart = Players({"1 bit": 0.1, "no exchange": 0.1}, digests=(7, 8))
    with pytest.raises(UserError, match="1 bit: all ranks must have the same model"):
        stepping.measure_steps(apart, "5M", GBIT, ["1 bit"], 1)
    stepping.measure_steps(apart, "5M", GBIT, ["no exchange"], 1)


@pytest.fixture
def results():
    seconds = {"1 bit": 0.05, "no exchange": 0.04, PLAIN: 0.3, HOOKS[0]: 0.2, HOOKS[1]: 0.15}
    times = [
        StepTime("5M", rate, name, step_s, [step_s], 8, 256 / step_s, (2.7, 1.0))
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


def test_rows_are_beside_plain_ddp_and_beside_its_best_hook(results):
    rows = {row.name: row for row in summary.Summary(results).rows}
    assert rows["5M, 1gbit, 1 bit"].ratio == pytest.approx(6)
    best = rows["5M, 1gbit, 1 bit, beside the best hook"]
    assert best.ratio == pytest.approx(3) and HOOKS[1] in best.reference
    assert not any("no exchange, beside" in name for name in rows)
    assert rows["1gbit, 1 bit: to 2.1 nats"].ratio == pytest.approx(64 * 0.3 / (128 * 0.05))
    never = rows[f"1gbit, {HOOKS[0]}: to 2.1 nats"]
    assert never.ratio is None and "never in 32 steps" in never.reference


def test_results_are_read_as_they_were_written(results, tmp_path, capsys):
    path = tmp_path / "training.json"
    summary.Summary(results).write(path)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # no Infinity
    again = summary.read(str(path))
    assert again.times == [
        StepTime(**{**vars(time), "losses": list(time.losses)}) for time in results.times
    ]
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
