"""Reports on runs: what a session leaves in its folder, the page about a run, and comparisons."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import parallel_sgd as psgd
from parallel_sgd.algorithms import ALGORITHMS
from parallel_sgd.command_line import read
from parallel_sgd.command_line.main import main
from parallel_sgd.command_line.train import main as train_main
from parallel_sgd.command_line.train.reporting import speed_in_words
from parallel_sgd.errors import UserError
from parallel_sgd.optimizers import OPTIMIZERS
from parallel_sgd.training.reports import (
    RunRecord,
    comparison_page,
    comparison_table,
    relative_to_first,
    run_page,
)
from parallel_sgd.training.reports.charts import TEXT_HEIGHT, _apart, line_chart, number

RANKS = 3


def data(seed: int) -> psgd.data.Arrays:
    x = np.random.default_rng(seed).standard_normal((120, 4)).astype(np.float32)
    return psgd.data.Arrays(x, x[:, :3].argmax(1))


def train(folder: Path, bits: int = 32, *, algorithm: psgd.Algorithm | None = None, **options):
    """Train on threads that are ranks, and return all rows."""

    def on_rank(comm: psgd.Communicator) -> list[psgd.Progress]:
        assert comm.size == RANKS
        model = psgd.models.MLP([4, 8, 3], seed=1)
        method = algorithm or psgd.DataParallelSGD(gradient_bits=bits)
        with psgd.Learner(model.parameters, psgd.SGD(lr=0.2), method, comm) as learner:
            return psgd.TrainingSession(
                learner=learner,
                objective=model,
                train=data(0),
                test=data(1),
                minibatch_size=12,
                epochs=4,
                folder=psgd.RunFolder(folder, {"ranks": RANKS}),
                **options,
            ).run()

    return psgd.simulate(RANKS, on_rank)[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[RunRecord]:
    folder = tmp_path_factory.mktemp("runs")
    for bits in (32, 1):
        train(folder / f"{bits}-bit", bits)
    return [RunRecord.read(folder / f"{bits}-bit") for bits in (32, 1)]


def test_a_run_leaves_its_status(runs):
    status = runs[1].status
    assert (status["status"], status["error"]) == ("complete", None)
    assert status["algorithm"] == "DataParallelSGD(gradient_bits=1)"
    assert status["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1, 2]


def test_times_of_ranks_add_up_to_the_time_of_training(runs):
    for run in runs:
        longest = run.rows[-1]["seconds"]
        for rank in run.ranks:
            seconds = rank["seconds"]
            assert min(seconds[kind] for kind in ("compute", "exchange", "update")) > 0
            steps = seconds["compute"] + seconds["exchange"] + seconds["update"]
            assert 0.5 * longest < steps < 1.5 * longest + 0.1


def test_the_page_shows_the_run(runs):
    page = (runs[1].folder / "report.html").read_text()
    last = runs[1].rows[-1]
    assert "Complete, " in page
    assert f"<b>{last['test_loss']:.4f}</b>" in page
    assert f"<b>{last['bytes_sent'] / 1e6:,.1f}</b>" in page
    assert page.count("rank 2 ") >= 1
    for figure in ("Loss", "Test accuracy", "Speed", "Bytes"):
        assert f"<figcaption>{figure}</figcaption>" in page
    assert "<script" not in page
    assert "http" not in page  # nothing is fetched
    for chart in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(chart)


def test_a_failed_run_tells_its_error(tmp_path):
    def fails(row: psgd.Progress) -> None:
        if row.samples >= 240:
            raise ValueError("<no> luck")

    with pytest.raises(UserError, match="no> luck"):
        train(tmp_path / "run", callbacks=[fails])
    run = RunRecord.read(tmp_path / "run")
    assert run.status["status"] == "failed"
    assert [line.partition(":")[0] for line in run.errors] == ["rank 0", "rank 1", "rank 2"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Failed, " in page
    assert "&lt;no&gt; luck" in page
    assert "<no>" not in page


def test_a_run_that_was_asked_to_leave(runs):
    status = {**runs[0].status, "status": "preempted"}
    assert "Can be resumed" in run_page(RunRecord(runs[0].folder, {}, runs[0].rows, status))
    assert "No status was recorded" in run_page(RunRecord(runs[0].folder, {}, runs[0].rows))


def test_times_of_asynchronous_workers_are_shown(tmp_path):
    train(tmp_path / "run", algorithm=psgd.DataParallelASGD())
    run = RunRecord.read(tmp_path / "run")
    workers = run.rows[-1]["details"]["workers"]
    assert [rank["seconds"] for rank in run.ranks] == [worker["seconds"] for worker in workers]
    assert "send and receive" in run_page(run)


def test_events_and_skipped_minibatches_are_listed(runs):
    details = {"skipped": {"minibatches": 2}, "recovery": {"ranks_lost": [1]}}
    row = {**runs[0].rows[-1], "event": "rolled back", "details": details}
    page = run_page(RunRecord(runs[0].folder, {}, [row]))
    assert "{&quot;ranks_lost&quot;: [1]}" in page
    assert "<td>480 samples</td><td>rolled back</td>" in page
    assert "{&quot;minibatches&quot;: 2}" in page


def test_the_summary_names_speed_and_parts_of_the_time(runs):
    words = speed_in_words(runs[0])
    parts = [int(part) for part in re.findall(r"(\d+) %", words)]
    assert re.match(r"[\d,]+; compute \d+ %, exchange and wait \d+ %, update \d+ %", words)
    assert 97 <= sum(parts) <= 103


def test_runs_are_compared(runs):
    header, *rows = comparison_table(runs).splitlines()
    assert [row.split()[0] for row in rows] == ["32-bit", "1-bit"]
    sent = [float(row.split()[-2]) for row in rows]
    assert sent == [round(run.rows[-1]["bytes_sent"] / 1e6, 1) for run in runs]
    level = float(header.split()[-1])
    lowest = [min(y for _, y in run.points("test_loss")) for run in runs]
    assert level == pytest.approx(max(lowest), abs=1e-4)
    page = comparison_page(runs)
    assert page.count("<svg") == 4
    assert "DataParallelSGD(gradient_bits=1)" in page


def test_the_other_runs_are_told_relative_to_the_first(runs):
    def run(name: str, seconds: float, sent: int, *losses: float) -> RunRecord:
        rows = [
            {"epoch": i, "samples": 10 * i, "seconds": i * seconds, "bytes_sent": i * sent}
            | {"test_loss": loss}
            for i, loss in enumerate(losses, 1)
        ]
        return RunRecord(runs[0].folder / name, {}, rows)

    slow, fast = run("slow", 3.0, 500, 0.75, 0.5), run("fast", 2.0, 125, 0.375, 0.25, 0.125)
    said = "reached a test loss of 0.5000 3.0 times as fast as slow, with 12.5 % of its bytes"
    assert relative_to_first([slow, fast]) == [f"fast {said}"]
    assert relative_to_first([slow, run("serial", 2.0, 0, 0.5)]) == []
    assert f"<p>fast {said}.</p>" in comparison_page([slow, fast])


def test_seconds_to_a_loss(runs):
    rows = [
        {"epoch": i, "samples": 10 * i, "seconds": float(i), "bytes_sent": 0, "test_loss": loss}
        for i, loss in enumerate([3.0, 1.0, 2.0, 0.5])
    ]
    run = RunRecord(runs[0].folder, {}, rows)
    assert [run.cost_of("test_loss", level) for level in (2.0, 0.5, 0.1)] == [1.0, 3.0, None]
    assert run.speed() == [(10, 10), (20, 10), (30, 10)]
    assert run.samples_per_second == 10


def test_the_command(runs, tmp_path, capsys):
    folders = [str(run.folder) for run in runs]
    assert main(["compare", *folders, "--html", str(tmp_path / "page.html")]) == 0
    assert comparison_table(runs) in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text() == comparison_page(runs)
    assert main(["compare", folders[0], "--html", str(tmp_path / "one.html")]) == 0
    assert (tmp_path / "one.html").read_text() == run_page(runs[0])


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "has no options.json"),
        ({"options.json": "[]"}, "must contain a JSON object"),
        ({"options.json": "{", "metrics.jsonl": ""}, "is not a JSON document"),
        ({"options.json": "{}", "metrics.jsonl": "{}\n"}, "line 1 must be a row"),
        ({"options.json": "{}", "metrics.jsonl": ""}, "must have rows"),
        ({"options.json": "{}"}, "must have rows"),
    ],
)
def test_what_is_no_run_is_refused(files, problem, tmp_path, capsys):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["compare", str(tmp_path)]) != 0
    assert problem in capsys.readouterr().err


def test_labels_do_not_cover_each_other():
    heights = _apart([100.0, 101.0, 250.0, 99.0, 255.0])
    gaps = np.diff(sorted(heights))
    assert gaps.min() >= TEXT_HEIGHT - 1e-9


def test_a_total_has_a_linear_axis():
    points = {"all": [(1.0, 1.0), (2.0, 50.0), (3.0, 100.0)]}
    linear = line_chart(points, "x", "y", linear=True)
    assert ">40<" in linear
    assert linear != line_chart(points, "x", "y")
    assert line_chart({"none": []}, "x", "y") == ""


def test_numbers_are_short():
    texts = [number(x) for x in (0, 0.01234, 5904, 12_000, 3.4e6, 2.5e9)]
    assert texts == ["0", "0.0123", "5904", "12k", "3.4M", "2.5G"]


@pytest.mark.parametrize("kind", [*ALGORITHMS.values(), *OPTIMIZERS.values()])
def test_brief_texts_give_equal_objects(kind):
    names = {kind.__name__: kind, "psgd": psgd}
    own = {"lr": 0.5} if kind in OPTIMIZERS.values() else {}
    made = kind(**own)
    assert len(made.brief()) <= len(repr(made))
    assert eval(made.brief(), names) == made


def test_a_brief_text_names_what_differs():
    made = psgd.BlockMomentumSGD(sync_steps=20, gradient_bits=4)
    assert made.brief() == "BlockMomentumSGD(sync_steps=20, gradient_bits=4)"
    assert psgd.DataParallelSGD().brief() == "DataParallelSGD()"


def test_the_help_begins_with_the_options_of_a_chosen_algorithm(capsys):
    def order(*argv: str) -> bool:
        with pytest.raises(SystemExit):
            read([*argv, "--help"])
        text = capsys.readouterr().out
        return text.index("\n--algorithm ") < text.index("\ndata:")

    assert order("--algorithm", "diloco")
    assert order("--algorithm=diloco")
    assert not order()


def test_options_of_a_run_that_differ_from_their_defaults(tmp_path):
    line = f"--epochs 1 --gradient-bits 4 --no-plot --output {tmp_path}/run"
    assert train_main(line.split()) == 0
    changed = json.loads((tmp_path / "run" / "options.json").read_text())["changed"]
    assert changed == {
        "epochs": "1",
        "no_plot": "True",
        "algorithm": "DataParallelSGD(gradient_bits=4)",
        "optimizer": "SGD(lr=0.3)",
    }
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<td>epochs</td><td>1</td>" in page
