"""The convergence benchmark in small: how rates are found, what a run is, and both studies."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from benchmark_players import options_of

from benchmarks import study as running
from benchmarks.convergence import algorithms, command, compression
from benchmarks.convergence import runs as carrying_out
from benchmarks.convergence.contenders import ALGORITHMS, BEGINNINGS, GRADIENTS, gain
from benchmarks.convergence.optimizers import OPTIMIZERS
from benchmarks.convergence.runs import Runs
from benchmarks.convergence.study import Plan
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.top_k import ONE_OF, TopK
from benchmarks.convergence.torch_tasks import TORCH_TASKS
from benchmarks.convergence.training import FIRST_TUNING_SEED, Outcome, Run, train
from benchmarks.convergence.tuning import Climb
from parallel_sgd import Parameters, UserError
from parallel_sgd.compression import registered_bits

RATES = OPTIMIZERS["SGD"].rates
POINTS = TASKS["digits"].points


@pytest.mark.parametrize(
    ("loss", "best", "rounds", "tried"),
    [
        (lambda i: (i - 8) ** 2, 8, 4, [4, 5, 6, 7, 8, 9]),  # both neighbours are worse
        (lambda i: float(i), 0, 5, [0, 1, 2, 3, 4, 5, 6]),  # at the edge, and says so
        (lambda i: min(3.0, i), 0, 5, [0, 1, 2, 3, 4, 5, 6]),  # leaves rates of equal divergence
    ],
)
def test_a_climb_ends_at_the_best(loss, best, rounds, tried):
    climb = Climb("digits", "serial", "SGD", 1)
    while wanted := climb.search.next_points():
        climb.search.scores |= {i: loss(i) for i in wanted}
        rounds -= 1
    assert climb.search.best == best and rounds == 0 and sorted(climb.search.scores) == tried
    assert climb.setting(best).lr == RATES[best] and climb.setting(best).at_edge == (best == 0)


def test_gains():
    def gain_of(name, options, ranks=8):
        return gain(ALGORITHMS[name].algorithm(options, 4), ranks)

    assert gain_of("averaging", ()) == 1
    assert gain_of("BMUF", ()) == 8
    assert gain_of("BMUF", (("block_momentum", 0.5), ("block_learning_rate", 0.5))) == 1
    assert gain_of("CNTK", ()) == 15
    assert gain_of("SlowMo", ()) == 2
    assert gain_of("DiLoCo", ()) == pytest.approx(7)


def test_everybody_sees_the_same_number_of_samples_in_whole_minibatches_and_blocks():
    for task in (TASKS[name] for name in algorithms.STUDIED):
        for contender in ALGORITHMS.values():
            for ranks in contender.ranks:
                assert task.budget(ranks) == task.samples
                assert task.samples % (task.points * ranks * task.minibatch * task.block) == 0


@pytest.mark.parametrize("times", [1, 8])
def test_losses_are_taken_after_whole_minibatches(times):
    for cell in compression.CELLS:
        task = TASKS[cell.task].shortened(times, None)
        assert task.steps_on(cell.ranks) % task.points == 0
        assert task.samples or task.steps_on(4) == task.steps_on(16)


def test_a_run_repeats():
    run = Run("digits", "32 bits", "SGD", 4, 0.4, (), seed=3, samples=1024)
    outcome = train(run)
    assert train(run) == outcome
    assert len(outcome.losses) == POINTS and outcome.bytes_sent > 0


def test_a_run_to_tune_on_is_tested_at_its_end_only():
    run = Run("digits", "32", "momentum", 2, 0.05, (), seed=FIRST_TUNING_SEED, samples=512)
    assert len(train(run).losses) == 1


def test_a_run_that_diverges_counts_as_knowing_nothing():
    outcome = train(Run("digits", "32 bits", "SGD", 2, 1e30, (), seed=0, samples=512))
    assert outcome.losses[-1] == pytest.approx(math.log(10), abs=1e-4)
    assert len(outcome.losses) == POINTS


def test_a_small_study_from_beginning_to_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, chosen = (
        tmp_path / "runs.json",
        Plan(["digits"], [4], seeds=2, tuning_seeds=1, shortened=128),
    )
    with Runs(path=str(path)) as runs:
        first = algorithms.carry_out(chosen, runs)
        assert runs.done
    before = path.read_bytes()
    with Runs(path=str(path), only_read=True) as runs:
        again = algorithms.carry_out(chosen, runs)
        more = algorithms.carry_out(Plan(seeds=3, tuning_seeds=1, shortened=128), runs)
        assert runs.done == 0 and not more.groups  # three seeds of serial SGD are not there
    assert path.read_bytes() == before and again.rows == first.rows
    again.print()
    printed = capsys.readouterr().out
    assert "data-parallel, 1 bit" in printed and "blocks of 8 minibatches, tuned on 1" in printed
    again.write(tmp_path / "rows.json")
    content = json.loads((tmp_path / "rows.json").read_text())
    assert set(content) == {"title", "machine", "rows"}
    assert all(math.isfinite(row["value"]) for row in content["rows"])
    assert any("error feedback" in row["name"] for row in content["rows"])
    again.draw(tmp_path / "c.png")
    drawn = {path.stem for path in tmp_path.glob("c-*.png")}
    assert drawn == {"c-samples", "c-bytes", "c-ranks", "c-error-feedback"}


def test_what_is_not_complete_is_dropped(monkeypatch):
    """Of a contender without a rate, and of what has its rate from there."""

    def outcome(run):
        assert run.contender != "32 bits", "a bug"
        points = 1 if run.seed >= FIRST_TUNING_SEED else POINTS
        return Outcome((1.0,) * points, run.ranks - 1)

    monkeypatch.setattr(carrying_out, "train", outcome)
    with Runs() as runs:
        study = algorithms.carry_out(Plan(["digits"], [4], seeds=2, tuning_seeds=1), runs)
    found = [(r.setting.contender, r.setting.rates) for r in study.groups["digits"]]
    assert ("1 bit", "tuned") in found and ("1 bit", "as 32 bits") not in found
    assert "32 bits" not in [name for name, rates in found if rates == "tuned"]


def test_compression_from_beginning_to_end(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    few = ("32", "4", "0.5", "top-k", "not there yet")
    cell = compression.Cell("digits", 4, "momentum", few)
    monkeypatch.setattr(compression, "CELLS", (cell,))
    with Runs(path=str(tmp_path / "runs.json")) as runs:
        study = compression.carry_out(Plan(seeds=2, tuning_seeds=1, shortened=128), runs)
    results = study.groups[cell]
    assert [result.setting.contender for result in results] == ["32", "4", "0.5", "top-k"]
    assert all(result.curves.shape == (2, POINTS) for result in results)
    assert 0.75 not in registered_bits()  # but where it has trained
    study.print()
    printed = capsys.readouterr().out
    assert "digits, MLP 64-128-10, K = 4, 16 steps of momentum" in printed
    rows = {row.name: row for row in study.rows}
    name = "digits, K=4, momentum, {}: sent"
    assert rows[name.format("32 bits")].value == pytest.approx(32, rel=0.01)
    assert rows[name.format("4 bits")].value == pytest.approx(4, rel=0.05)
    extra = (256 / 9610 + 256 / 2403) / 2  # bits of a message beside those of its values
    assert rows[name.format("0.5 bit")].value == pytest.approx(0.5 + extra, rel=0.15)
    assert rows[name.format("top 16 of 1024")].value == pytest.approx(0.75, rel=0.05)
    study.draw(tmp_path / "c.png")
    drawn = {path.stem for path in tmp_path.glob("c-*.png")}
    assert drawn == {"c-samples", "c-bytes", "c-distance"}


def test_what_the_plans_name_is_there():
    assert set(compression.Compression.styles) == GRADIENTS.keys() | BEGINNINGS.keys()
    assert set(algorithms.Algorithms.styles) == ALGORITHMS.keys()
    for cell in (*compression.CELLS, *compression.TORCH_CELLS):
        assert cell.task in TASKS and cell.contenders[0] == "32"
        assert set(cell.contenders) <= set(compression.Compression.styles)
        for name in cell.contenders:
            start = compression.start(cell, name)
            Climb(cell.task, name, cell.optimizer, cell.ranks, start=start)  # it is on the grid


def test_a_beginning_has_other_bits_for_its_part_of_the_samples():
    algorithm = BEGINNINGS["4-then-1"].algorithm((), 1, samples=4096)
    assert algorithm.exchange.gradient_bits == {0: 4, 256: 1}


def test_top_k_sends_the_largest_and_keeps_the_rest():
    random = np.random.default_rng(1)
    parameters = Parameters({"a": np.zeros((50, 50), np.float32), "b": np.zeros(7, np.float32)})
    codec = TopK()
    blocks = codec.blocks(parameters)
    size = parameters.flat.size
    vector, residual = random.standard_normal((2, size)).astype(np.float32)
    before, payload = vector + residual, np.empty(blocks.bytes.stop, np.uint8)
    codec.encode(blocks, vector, residual, payload)
    sent, more = np.empty(size, np.float32), np.ones(size, np.float32)
    codec.decode(blocks, payload, sent, add=False)
    codec.decode(blocks, payload, more, add=True)
    assert np.array_equal(more, 1 + sent)
    assert np.array_equal(sent + residual, before) and not (sent * residual).any()
    for begin, end in zip(blocks.starts, blocks.starts[1:], strict=False):
        kept = sent[begin:end] != 0
        assert kept.sum() == -(-(end - begin) // ONE_OF)
        assert np.abs(before[begin:end][kept]).min() >= np.abs(residual[begin:end]).max()


def line(seeds):
    """Wants these seeds, and then one more; returns the losses."""
    first = yield [a_run(seed) for seed in seeds]
    last = yield [a_run(100)]
    return [outcome.losses[0] for outcome in [*first.values(), *last.values()]]


def a_run(seed):
    return Run("digits", "32", "SGD", 4, 0.1, (), seed, samples=512)


@pytest.fixture
def trained(monkeypatch):
    """The seeds that have been trained, of runs that take no time; seed 7 fails."""
    seeds = []

    def train(run):
        seeds.append(run.seed)
        assert run.seed != 7, "a bug"
        return Outcome((float(run.seed),), 1)

    monkeypatch.setattr(carrying_out, "train", train)
    return seeds


def test_lines_do_not_wait_for_each_other_and_share_runs(trained, tmp_path):
    path = tmp_path / "runs.json"
    with Runs(path=str(path)) as runs:
        assert runs.follow([line([1, 2]), line([2, 3])]) == [[1, 2, 100], [2, 3, 100]]
    assert trained == [1, 2, 100, 3]
    with Runs(path=str(path)) as runs:
        assert runs.follow([line([3])]) == [[3, 100]]
    assert len(trained) == 4


def test_a_run_that_fails_ends_its_line_only(trained, capsys):
    with Runs() as runs:
        assert runs.follow([line([7]), line([1])]) == [None, [1, 100]]
    assert "a bug" in capsys.readouterr().err


def test_no_run_is_begun_that_will_not_end_in_time(trained):
    with Runs(minutes=1) as runs:
        assert runs.follow([line([1])]) == [[1, 100]]
        runs._seconds["digits", 4] = 90
        assert runs.follow([line([2]), line([1])]) == [None, [1, 100]]
    assert trained == [1, 100]


def test_outcomes_are_on_disk_while_others_are_under_way(trained, tmp_path, monkeypatch):
    path, seen = tmp_path / "runs.json", []
    monkeypatch.setattr(running, "SAVE_EVERY_S", 0)

    def watching():
        yield [a_run(1)]
        seen.append(len(carrying_out.read(path)))
        yield [a_run(2)]
        seen.append(len(carrying_out.read(path)))

    with Runs(path=str(path)) as runs:
        runs.follow([watching()])
    assert seen == [1, 2]


def test_options_become_a_plan():
    assert plan("--quick", "--task", "bytes", "--ranks", "8", "16") == Plan(
        ["bytes"], [8, 16], seeds=3, tuning_seeds=1, shortened=8
    )
    assert plan() == plan("--compression") == Plan()
    quick = plan("--compression", "--quick", "--optimizer", "Adam")
    assert quick == Plan(["bytes-256"], [4], ["Adam"], seeds=3, tuning_seeds=1, shortened=8)
    assert [cell.optimizer for cell in compression.cells_of(quick)] == ["Adam"]


def test_pytorch_tasks_take_part_where_they_are_named(monkeypatch):
    cells = compression.cells_of(plan("--compression"))
    assert not any(cell.task in TORCH_TASKS for cell in cells)
    assert tuple(TORCH_TASKS) == compression.TORCH_STUDIED
    named = plan("--compression", "--task", "transformer", "--contender", "sign", "1")
    assert [compression.contenders_of(named, cell) for cell in compression.cells_of(named)] == [
        ["32", "1", "sign"],
        ["32", "1"],
    ]
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--task transformer needs PyTorch: pip install"):
        plan("--compression", "--task", "transformer")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--task", "bytes-256"], "--task bytes-256 must be one of this study's: digits, bytes"),
        (["--compression", "--task", "bytes"], "--task bytes must be one of this study's"),
        (["--contender", "sign"], "--contender is for --compression only"),
        (["--minutes", "1"], "--minutes is for --compression only"),
    ],
)
def test_options_of_the_other_study_are_refused(arguments, problem):
    with pytest.raises(UserError, match=problem):
        plan(*arguments)


def plan(*arguments):
    return command.plan_of(options_of(" ".join(["convergence", *arguments])))
