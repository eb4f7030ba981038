"""The convergence benchmark in small: how rates are found, what a run is, and both studies."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from benchmark_players import options_of

from benchmarks import study as running
from benchmarks.convergence import cells, command, figures
from benchmarks.convergence.cells import OF_ALGORITHMS, OF_COMPRESSION, Cell, Line
from benchmarks.convergence.contenders import ALGORITHMS, BEGINNINGS, BLOCK
from benchmarks.convergence.optimizers import OPTIMIZERS
from benchmarks.convergence.runs import load, write
from benchmarks.convergence.study import Study, Tuner, results_of
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.top_k import ONE_OF, TopK
from benchmarks.convergence.training import FIRST_TUNING_SEED, Outcome, Run, train
from benchmarks.study import MissingRun, Runs, Search
from parallel_sgd import Parameters, UserError
from parallel_sgd.compression import registered_bits

VERDICT = r"[+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\) (equivalent|better|worse|undecided)"
POINTS = TASKS["digits"].points
DIGITS = OF_ALGORITHMS[0]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LONG_BLOCKS = RESULTS / "convergence-long-blocks-runs.json"


@pytest.mark.parametrize(
    ("loss", "best", "rounds", "tried"),
    [
        (lambda i: (i - 8) ** 2, 8, 4, [4, 5, 6, 7, 8, 9]),  # both neighbours are worse
        (lambda i: float(i), 0, 5, [0, 1, 2, 3, 4, 5, 6]),  # at the edge
        (lambda i: min(3.0, i), 0, 5, [0, 1, 2, 3, 4, 5, 6]),  # leaves rates of equal divergence
    ],
)
def test_a_search_ends_at_the_best(loss, best, rounds, tried):
    search = Search(5, 11)
    while places := search.next_points():
        search.scores |= {i: loss(i) for i in places}
        rounds -= 1
    assert search.best == best and rounds == 0 and sorted(search.scores) == tried


def test_losses_are_taken_after_whole_minibatches_and_blocks():
    for cell in (*OF_ALGORITHMS, *OF_COMPRESSION):
        task = TASKS[cell.task]
        for line in cell.lines():
            block = BLOCK if cell.ranks is None else 1
            part = task.points * line.ranks * task.minibatch * block
            assert task.budget(line.ranks) % part == 0
            assert task.budget(line.ranks) == task.samples or cell.ranks


def test_a_run_repeats():
    run = Run("digits", "32 bits", "SGD", 4, 0.4, (), seed=3, samples=1024)
    outcome = train(run)
    assert train(run) == outcome
    assert len(outcome.losses) == POINTS and outcome.bytes_sent > 0
    assert len(train(replace(run, seed=FIRST_TUNING_SEED)).losses) == 1


def test_a_run_that_diverges_counts_as_knowing_nothing():
    outcome = train(Run("digits", "32 bits", "SGD", 2, 1e30, (), seed=0, samples=512))
    assert outcome.losses[-1] == pytest.approx(math.log(10), abs=1e-4)
    assert len(outcome.losses) == POINTS


@pytest.fixture
def short(monkeypatch):
    """Digits in 512 samples."""
    monkeypatch.setitem(TASKS, "digits", replace(TASKS["digits"], samples=512))


@pytest.mark.usefixtures("short")
def test_a_small_study_from_beginning_to_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, line = tmp_path / "runs.json", "--task digits --ranks 4 --tuning-seeds 1"
    first = study(f"{line} --seeds 2 --jobs 1 --runs {path}")
    before = path.read_bytes()
    again = study(f"{line} --seeds 2 --table {path}")
    assert path.read_bytes() == before and again.tables == first.tables
    assert not study(f"{line} --seeds 3 --table {path}").groups  # a seed of serial SGD is missing
    again.print()
    printed = capsys.readouterr().out
    assert "| data-parallel, 1 bit" in printed and "a rank's minibatch 8, margin ±0.01" in printed
    again.write(tmp_path / "rows.json")
    content = json.loads((tmp_path / "rows.json").read_text())
    (rows,) = content["tables"].values()
    (row,) = (
        row for row in rows if row[""] == "data-parallel, 1 bit, sign" and "as" in row["rates"]
    )
    assert row["beside"] == "data-parallel, 32 bits, K=4, tuned"
    assert re.fullmatch(VERDICT, row["less serial SGD"]) and re.fullmatch(VERDICT, row["less it"])
    again.draw(tmp_path / "c.png")
    drawn = {path.stem for path in tmp_path.glob("c-*.png")}
    assert drawn == {"c-samples", "c-bytes", "c-ranks", "c-error-feedback"}


@pytest.mark.usefixtures("short")
def test_compression_from_beginning_to_end(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    cell = Cell("digits", ("32", "4", "0.5", "top-k"), 4, "momentum", 0.1)
    monkeypatch.setitem(cells.STUDIES, "compression", (cell,))
    report = study("--study compression --seeds 2 --tuning-seeds 1 --jobs 1")
    assert all(result.curves.shape == (2, POINTS) for result in report.groups[cell])
    assert 0.75 not in registered_bits()  # but where it has trained
    report.print()
    assert "digits, MLP 64-128-10, K = 4, 16 steps of momentum" in capsys.readouterr().out
    (rows,) = report.tables.values()
    extra = (256 / 9610 + 256 / 2403) / 2  # bits of a message beside those of its values
    expected = [32, 4, 0.5 + extra, 0.75]
    assert [float(row["bits sent"]) for row in rows] == pytest.approx(expected, rel=0.15)
    report.draw(tmp_path / "c.png")
    assert [path.stem for path in tmp_path.glob("c-*.png")] == ["c-distance"]


def test_the_study_of_long_blocks_from_its_runs(tmp_path):
    """Nothing is trained: the runs are those that are kept."""
    pytest.importorskip("matplotlib")
    chosen = f"--study long-blocks --task bytes-256-long --seeds 3 --table {LONG_BLOCKS}"
    report = study(f"{chosen} --seconds-on 10mbit")
    (rows,) = report.tables.values()
    assert len(rows) == len(cells.FRONTIER)
    whole, _, one_bit, *_ = rows
    assert float(whole["bits sent"]) == pytest.approx(32, rel=0.01)
    whole_s, one_bit_s = (float(row["s on 10mbit"]) for row in (whole, one_bit))
    assert whole_s - one_bit_s > 1500 and one_bit_s > 55  # 2,073 and 66 MB at 1.1 MB/s
    report.draw(tmp_path / "b.png")
    names = {path.stem for path in tmp_path.glob("b-*.png")}
    assert names == {"b-bytes", "b-10mbit", "b-100mbit", "b-1gbit"}


def test_the_best_points_of_a_figure():
    points = [(1, 3), (2, 4), (3, 1), (2, 2), (4, 1)]
    assert figures._undominated(points) == [(1, 3), (2, 2), (3, 1)]


def study(line):
    return command.main(options_of(f"convergence {line}"))


def test_the_origins_of_rates():
    """Of tuned options the best; and the rate of serial SGD, or of the peer."""

    def outcome(run):
        best = {"serial": 0.2, "averaging": 0.8, "BMUF": 0.1}.get(run.contender, 0.4)
        loss = abs(math.log2(run.lr / best)) + (dict(run.options).get("block_momentum") != 0.5)
        return Outcome((loss,), 1)

    with Runs(outcome) as runs:
        tuner = Tuner(runs, seeds=1)
        for name, rates, lr, options in (
            ("BMUF", "tuned", 0.1, {"block_momentum": 0.5}),
            ("BMUF", "equal", 0.2, {}),
            ("BMUF", "gain 1", 0.8, {"block_momentum": 0.8, "block_learning_rate": 0.2}),
            ("BMUF 4 bits", "as 32 bits", 0.1, {"block_momentum": 0.5}),
        ):
            run = tuner.run(DIGITS, Line(name, 8, rates))
            assert run.lr == pytest.approx(lr) and run.options == tuple(options.items())


def test_what_is_not_complete_is_dropped(capsys):
    """A contender without a rate, whatever takes its rate, and a cell without its first line."""

    def outcome(failing, run):
        assert run.contender != failing, "a bug"
        points = 1 if run.seed >= FIRST_TUNING_SEED else POINTS
        return Outcome((1.0,) * points, run.ranks - 1)

    with Runs(partial(outcome, "32 bits")) as runs:
        (results,) = results_of([DIGITS], Tuner(runs, 2), [4]).values()
    found = {(result.line.contender, result.line.rates) for result in results}
    assert ("1 bit", "tuned") in found and ("1 bit", "as 32 bits") not in found
    assert ("32 bits", "equal") not in found
    assert "a bug" in capsys.readouterr().err
    (rows,) = Study({DIGITS: results}, 2, {}).tables.values()
    assert rows[0]["lr"] == "0.0125*"  # all losses are equal: the search ends at the edge
    with Runs(partial(outcome, "serial")) as runs:
        assert not results_of([DIGITS], Tuner(runs, 2), [4])


def test_every_search_begins_on_its_grid():
    for cell in (*OF_ALGORITHMS, *OF_COMPRESSION):
        for name in cell.contenders:
            assert cell.start_of(name) in OPTIMIZERS[cell.optimizer_of(name)].rates
    assert {ALGORITHMS[name].peer for name in ALGORITHMS} <= {None, *ALGORITHMS}


def test_a_beginning_has_other_bits_for_its_part_of_the_samples():
    algorithm = BEGINNINGS["4-then-1"].algorithm((), samples=4096)
    assert algorithm.exchange.gradient_bits == {0: 4, 256: 1}


def test_top_k_sends_the_largest_and_keeps_the_rest():
    parameters = Parameters({"a": np.zeros((50, 50), np.float32), "b": np.zeros(7, np.float32)})
    codec, blocks = TopK(), TopK().blocks(parameters)
    vector, residual = np.random.default_rng(1).standard_normal((2, 2507)).astype(np.float32)
    before, payload = vector + residual, np.empty(blocks.bytes.stop, np.uint8)
    codec.encode(blocks, vector, residual, payload)
    sent, more = np.empty_like(vector), np.ones_like(vector)
    codec.decode(blocks, payload, sent, add=False)
    codec.decode(blocks, payload, more, add=True)
    assert np.array_equal(more, 1 + sent)
    assert np.array_equal(sent + residual, before) and not (sent * residual).any()
    for begin, end in itertools.pairwise(blocks.starts):
        kept = np.abs(sent[begin:end][sent[begin:end] != 0])
        assert len(kept) == -(-(end - begin) // ONE_OF)
        assert kept.min() >= np.abs(residual[begin:end]).max()


class Trainer:
    """Trains at once; seed 7 fails."""

    def __init__(self):
        self.seeds = []

    def __call__(self, seed):
        self.seeds.append(seed)
        assert seed != 7, "a bug"
        return float(seed)


def test_lines_share_runs_and_known_ones_are_not_carried_out():
    trainer, saved = Trainer(), []

    def line(seeds):
        return runs.outcomes_of(seeds) + runs.outcomes_of([100])

    with Runs(trainer, known={3: 3.0}, save=lambda outcomes: saved.append({*outcomes})) as runs:
        assert runs.map(line, [[1, 2], [2, 3]]) == [[1, 2, 100], [2, 3, 100]]
    assert trainer.seeds == [1, 2, 100] and saved == [{1, 2, 3, 100}]


def test_a_run_that_fails_ends_its_line_only(capsys):
    with Runs(Trainer()) as runs:
        assert runs.map(runs.outcomes_of, [[7], [1]]) == [None, [1]]
    assert "a bug" in capsys.readouterr().err


def test_no_run_is_begun_that_will_not_end_in_time():
    trainer = Trainer()
    with Runs(trainer, minutes=1, kind=lambda seed: seed % 2) as runs:
        assert runs.map(runs.outcomes_of, [[1], [2]]) == [[1], [2]]
        runs._seconds[1] = 90
        assert runs.map(runs.outcomes_of, [[1, 3], [4]]) == [None, [4]]
    assert trainer.seeds == [1, 2, 4]


def test_no_more_runs_begin_after_an_error_in_a_line():
    def line(seed):
        if seed:
            runs.outcomes_of([seed])
        raise ZeroDivisionError

    trainer = Trainer()
    with Runs(trainer) as runs:
        with pytest.raises(ZeroDivisionError):
            runs.map(line, [0, 1, 2])
        with pytest.raises(MissingRun):
            runs.outcomes_of([3])
    assert 3 not in trainer.seeds


def test_several_runs_at_a_time_are_carried_out_in_processes():
    with Runs(math.sqrt, jobs=2) as runs:
        assert runs.map(runs.outcomes_of, [[1, 4], [9]]) == [[1, 2], [3]]


def test_outcomes_are_saved_while_others_are_under_way(monkeypatch):
    monkeypatch.setattr(running, "SAVE_EVERY_S", 0)
    saved = []
    with Runs(Trainer(), save=lambda outcomes: saved.append([*outcomes])) as runs:
        runs.outcomes_of([1])
        assert saved == [[1]]


def test_outcomes_are_read_as_they_were_written(tmp_path):
    run = Run("digits", "32", "SGD", 4, 0.1, (("block_momentum", 0.5),), 0, samples=512)
    outcomes = {
        run: Outcome((2.0, 1.0), 10),
        replace(run, seed=1): Outcome((2.5, 1.5), 12),
        replace(run, lr=0.2): Outcome((2.0, 1.0), 10),
    }
    path = tmp_path / "runs.json"
    write(path, outcomes)
    assert load(path) == outcomes and len(path.read_text().splitlines()) == 4
    assert load(tmp_path / "none.json") == {}


def test_the_cells_that_options_choose(monkeypatch):
    def chosen(line):
        return command.chosen(options_of(f"convergence {line}"))

    assert chosen("") == [*OF_ALGORITHMS] and chosen("--task bytes") == [OF_ALGORITHMS[1]]
    assert {cell.task for cell in chosen("--study compression")} == {
        *("bytes-256", "digits", "bytes-1024", "bytes-1024-long")
    }
    (cell,) = chosen("--study compression --task transformer --optimizer AdamW")
    assert (cell.task, cell.optimizer) == ("transformer", "AdamW")
    assert {line.ranks for line in DIGITS.lines([16])} == {1, 16}
    for line in ("--task bytes-256", "--study compression --task bytes", "--optimizer Adam"):
        with pytest.raises(UserError, match="there are none but this study's: "):
            chosen(line)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--task transformer needs PyTorch: pip install"):
        chosen("--study compression --task transformer")
