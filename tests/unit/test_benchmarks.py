"""The statistics of the benchmarks, and reports in files."""

from __future__ import annotations

import ast
import doctest
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import numpy as np
import pytest

from benchmarks import rans, report
from benchmarks.__main__ import main as benchmarks_main
from benchmarks.convergence.runs import load as load_runs
from benchmarks.report import Report, load
from benchmarks.statistics import bootstrap_interval, compare
from benchmarks.training.summary import Results
from parallel_sgd import UserError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "benchmarks").rglob("*.py")
}


def test_the_intervals_of_equal_values_and_of_two_are_known():
    assert bootstrap_interval([0.25] * 10, 0.9) == (0.25, 0.25)
    # the mean of two draws is 0, 1/2 or 1, with probabilities 1/4, 1/2 and 1/4
    assert bootstrap_interval([0, 1], 0.90) == (0, 1)
    assert bootstrap_interval([0, 1], 0.40) == (0.5, 0.5)


def test_intervals_cover_the_mean_as_often_as_the_docstring_says():
    random = np.random.default_rng(1)
    spans = [bootstrap_interval(random.standard_normal(10), 0.9) for _ in range(400)]
    covered = np.mean([low <= 0 <= high for low, high in spans])
    assert covered == pytest.approx(0.86, abs=0.05)


def test_pairing_removes_what_seeds_have_in_common():
    common = np.random.default_rng(2).normal(1, 1, 10)  # far more than the margin
    noise = np.random.default_rng(3).normal(0, 0.001, 10)
    comparison = compare(common + noise, common, margin=0.01)
    assert comparison.verdict == "equivalent"
    assert comparison.mean == pytest.approx(noise.mean())


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.003, 0.005, 0.004], "equivalent"),  # different, and yet within the margin
        ([0.02, 0.03, 0.025], "worse"),
        ([-0.02, -0.03, -0.025], "better"),
        ([-0.03, 0.04, 0.0], "undecided"),  # no difference seen is not equivalence
        ([0.0, 0.0, 0.0], "equivalent"),
    ],
)
def test_verdicts(differences, verdict):
    comparison = compare(np.array(differences) + 0.5, [0.5] * 3, margin=0.01)
    assert comparison.verdict == verdict
    assert (verdict == "equivalent") == (comparison.reach <= 1)


def test_a_report_is_printed_and_drawn_anew_from_its_file(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "plan.png"
    line = ["plan", "--table", str(RESULTS / "plan.json"), "--figure", str(figure)]
    assert benchmarks_main(line) == 0
    assert capsys.readouterr().out.count(" hosts, ") >= 36
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_example_of_a_table():
    failed, tried = doctest.testmod(report)
    assert tried > 0 and failed == 0


def test_a_report_that_is_read_names_the_machine_that_measured_it(tmp_path):
    report = Report("a title")
    report.add("a row", 1.0, "ms", "nothing", None)
    report.machine = {"processor": "another"}
    report.write(tmp_path / "old.json")
    Report.read(tmp_path / "old.json").write(tmp_path / "new.json")
    assert (tmp_path / "new.json").read_bytes() == (tmp_path / "old.json").read_bytes()


@pytest.mark.parametrize("flag", ["--json", "--figure", "--table"])
def test_a_path_that_is_none_is_refused_before_anything_is_measured(capsys, flag):
    assert benchmarks_main(["kernels", flag, ""]) == 1
    assert f"{flag}='' must be the path of a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reads", "wrong"),
    [
        (load_runs, "not the runs"),
        (lambda path: load(path, Results), "not the results of this benchmark"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, reads, wrong):
    path = tmp_path / "a.json"
    path.write_text('{"rows": []}')
    with pytest.raises(UserError, match=wrong):
        reads(path)


def test_no_benchmark_imports_itself_in_a_circle():
    """Counts a package's __init__, which runs first, and imports within functions."""
    imports = {name: imported(path, name) for name, path in BENCHMARKS.items()}
    TopologicalSorter(imports).prepare()  # CycleError names the circle


def imported(path, name):
    """Return the modules of benchmarks that a module imports, and their packages."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = {package}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = resolve_name(base, package) if node.level else base
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    found |= {f.rpartition(".")[0] for f in found if f.count(".") > 1}
    return found & BENCHMARKS.keys() - {name}


def test_rans_is_as_short_as_the_entropy_and_undone_exactly():
    symbols = np.random.default_rng(4).binomial(8, 0.1, 20_001).astype(np.uint16)
    parts, values = rans.frequencies(symbols), np.arange(9, dtype=np.float32)
    space, out = np.empty(len(symbols) + 64, np.uint16), np.ones(len(symbols), np.float32)
    stream = space[rans.encode(symbols, parts, space) :].copy()
    rans.decode(stream, parts, values, out, True)
    assert np.array_equal(out, 1 + values[symbols])
    shares = np.bincount(symbols) / len(symbols)
    entropy = -(shares * np.log2(shares, where=shares > 0, out=0 * shares)).sum() * len(symbols)
    assert entropy <= 8 * stream.nbytes < 1.02 * entropy
