"""Tables of the pages of measurements say what the results say that they are from.

Each figure is the result, rounded to as many places as are shown. Of a cell the first number is
seconds, and what ends in a times sign how many times as fast as PyTorch's DDP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.report import load
from benchmarks.training.contenders import CONTENDERS, PLAIN
from benchmarks.training.summary import Results, plain_seconds

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TIMES = "\N{MULTIPLICATION SIGN}"
M10, M100, G1, G10, NO_LINKS = "10mbit", "100mbit", "1gbit", "10gbit", "unlimited"

#: What contenders are called in the tables.
CALLED = {
    "DDP": "DDP",
    "PyTorch DDP over gloo": "DDP",
    "DDP, its defaults": "DDP, its defaults",
    "DDP, gradients in its buckets (`gradient_as_bucket_view`)": "DDP",
    "… fp16": "DDP, fp16",
    "… with fp16": "DDP, fp16",
    "… PowerSGD rank 1": "DDP, PowerSGD rank 1",
    "… with PowerSGD, rank 1": "DDP, PowerSGD rank 1",
    "… PowerSGD rank 4": "DDP, PowerSGD rank 4",
    "… with PowerSGD, rank 4": "DDP, PowerSGD rank 4",
    "… post-local SGD": "DDP, post-local SGD",
    "… with post-local SGD": "DDP, post-local SGD",
    "ours, 32 bit": "32 bit",
    "the learner, 32 bit": "32 bit",
    "… with overlap": "32 bit, overlap",
    "8 bit, overlap": "8 bit, overlap",
    "ours, 4 bit": "4 bit",
    "4 bit": "4 bit",
    "ours, 1 bit": "1 bit",
    "1 bit": "1 bit",
    "0.25 bit": "0.25 bit",
    "0.1 bit": "0.1 bit",
    "ours, a tenth of a bit": "0.1 bit",
    "ours, a quarter of a bit": "0.25 bit",
    "a quarter of a bit": "0.25 bit",
    "a tenth of a bit": "0.1 bit",
    "ours, block momentum at 1 bit": "block momentum, 1 bit",
    "block momentum, blocks of 16, 1 bit": "block momentum, 1 bit",
    "PowerSGD rank 4, ours": "PowerSGD rank 4",
    **{f"`compress`, {bits} bit": f"compress, {bits} bit" for bits in (32, 4, 1)},
    **{f"our hook over MPI, {bits} bit": f"our hook, {bits} bit" for bits in (32, 4, 1)},
    **{f"the learner over MPI, {bits} bit": f"{bits} bit" for bits in (32, 4, 1)},
    "DDP with our hook, 32 bit": "our hook, 32 bit",
    "… 1 bit": "our hook, 1 bit",
    "DDP with our hook, 1 bit": "our hook, 1 bit",
    "PyTorch, no exchange at all": "PyTorch, no exchange",
    "no exchange at all": "no exchange",
    "no exchange at all: the limit": "no exchange",
}


def rows(page: str, heading: str) -> Iterator[tuple[str, list[str]]]:
    """The contender and the cells of each row of the one table whose first line begins so."""
    lines = (ROOT / page).read_text().splitlines()
    (first,) = (i for i, line in enumerate(lines) if line.startswith(heading))
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            return
        name, *cells = (cell.strip().replace("**", "") for cell in line[1:-1].split("|"))
        yield CALLED.get(name.replace("**", ""), name), cells


def rounded(text: str, value: float) -> bool:
    """Whether a number is this one, rounded to the places that it has."""
    places = len(text.partition(".")[2])
    return abs(float(text.replace(",", "")) - value) <= 0.5 * 10**-places + 1e-9


def wrong(cell: str, seconds: float | None, times: float | None) -> bool:
    """Whether a cell, as `303 s` or `152 s, 2.0×` or `2.0×`, says something else."""
    numbers = re.findall(rf"([\d.,]*\d)(?: s)?({TIMES}?)", cell)
    assert numbers, cell
    return not all(
        rounded(text, found)
        for text, sign in numbers
        if (found := times if sign else seconds) is not None
    ) or any(sign and times is None for _, sign in numbers)


@dataclass(frozen=True)
class OfSteps:
    """A table of seconds a step: which cases its columns are."""

    page: str
    heading: str
    results: str
    columns: tuple[tuple[str, str], ...]


TORCH_PAGE = "docs/measurements/pytorch_models.md"

OF_STEPS = [
    OfSteps(
        "docs/measurements.md",
        "| | 5 million parameters | 24 million |",
        "training",
        (("5M", G1), ("24M", G1)),
    ),
    OfSteps(
        TORCH_PAGE,
        "| | transformer, 1 Gbit/s | MLP, 1 Gbit/s |",
        "training-torch-2",
        (("transformer", G1), ("24M", G1)),
    ),
    OfSteps(
        TORCH_PAGE,
        "| | transformer | MLP |",
        "training-torch-4",
        (("transformer", G1), ("24M", G1)),
    ),
    OfSteps(
        TORCH_PAGE,
        "| 2 hosts | MLP, 100 Mbit/s | MLP, 1 Gbit/s | transformer, 100 Mbit/s | 1 Gbit/s |",
        "training-process-group-2",
        (("5M", M100), ("5M", G1), ("transformer", M100), ("transformer", G1)),
    ),
    OfSteps(
        TORCH_PAGE,
        "| 4 hosts | MLP, 100 Mbit/s | MLP, 1 Gbit/s | transformer, 100 Mbit/s | 1 Gbit/s |",
        "training-process-group-4",
        (("5M", M100), ("5M", G1), ("transformer", M100), ("transformer", G1)),
    ),
    OfSteps(
        TORCH_PAGE,
        "| | transformer, s a step | MLP | transformer, MiB | MLP |",
        "training-torch-here",
        (("transformer", NO_LINKS), ("24M", NO_LINKS)),
    ),
]
#: Rows with two contenders in a cell.
TWO = {
    "… with fp16, with PowerSGD rank 1": ("DDP, fp16", "DDP, PowerSGD rank 1"),
}


def read_results(name: str) -> Results:
    return load(RESULTS / f"{name}.json", Results)


@pytest.mark.parametrize("table", OF_STEPS, ids=lambda table: table.results)
def test_seconds_a_step(table):
    results, count, said_wrong = read_results(table.results), 0, []
    for name, cells in rows(table.page, table.heading):
        for cell, (model, rate) in zip(cells, table.columns, strict=False):
            times = results.by_rate(model)[rate]
            parts = list(zip(cell.split(", "), TWO[name], strict=True)) if name in TWO else None
            for text, contender in parts or [(cell, name)]:
                seconds = times[contender].seconds
                ratio = times[PLAIN].seconds / seconds
                count += 1
                if wrong(text, seconds, ratio):
                    said_wrong.append((name, model, rate, text, seconds, ratio))
    assert said_wrong == []
    assert count >= 12


def of_ways(results: Results, name: str, rate: str, target: float) -> tuple[float, float, float]:
    """Steps to a loss, seconds, and how many times as fast as DDP."""
    ways = results.ways()[rate]
    (way,) = (way for way in ways if (way.contender, way.target) == (name, target))
    plain = plain_seconds(ways, target)
    assert way.reached
    assert plain is not None
    return way.steps, way.seconds, plain / way.seconds


def test_the_seconds_to_the_lowest_loss():
    results, count = read_results("training-to-loss"), 0
    heading = "| | steps | links of 10 Mbit/s | 100 Mbit/s | 1 Gbit/s | 10 Gbit/s |"
    for name, (steps, *cells) in rows("docs/measurements.md", heading):
        for cell, rate in zip(cells, (M10, M100, G1, G10), strict=True):
            count += 1
            expected, seconds, times = of_ways(results, name, rate, 1.95)
            assert rounded(steps, expected), (name, steps)
            assert not wrong(cell, seconds, times), (name, rate, cell, seconds, times)
    assert count == 44


BYTES_HEAD = "| seconds to 2.4, 2.1, 1.95 nats | steps |"
TORCH_HEAD = "| | rate | steps to 2.7, 2.5, 2.4 nats |"
SLOW, FAST = (M10, M100), (G1, G10)
TO_LOSS = [
    ("docs/measurements.md", f"{BYTES_HEAD} 10 Mbit/s |", "training-to-loss", SLOW),
    ("docs/measurements.md", f"{BYTES_HEAD} 1 Gbit/s |", "training-to-loss", FAST),
    (TORCH_PAGE, f"{TORCH_HEAD} 10 Mbit/s |", "training-torch-to-loss", SLOW),
    (TORCH_PAGE, "| | steps to 2.7, 2.5, 2.4 nats | 1 Gbit/s |", "training-torch-to-loss", FAST),
]
OF_TO_LOSS = ["bytes-slow", "bytes-fast", "torch-slow", "torch-fast"]


@pytest.mark.parametrize(("page", "heading", "name", "rates"), TO_LOSS, ids=OF_TO_LOSS)
def test_seconds_to_a_loss(page, heading, name, rates):
    results, said_wrong, count = read_results(name), [], 0
    for contender, cells in rows(page, heading):
        if len(cells) > 1 + len(rates):
            lr = float(cells.pop(0))
            learned = CONTENDERS[contender].learns_as or contender
            assert lr == {run.contender: run.lr for run in results.runs}[learned], contender
        steps, *of_rates = cells
        for cell, rate in zip(of_rates, rates, strict=True):
            figures = re.findall(rf"[\d.,]*\d ?[s{TIMES}]?", cell)
            targets = results.goal.targets
            pairs = zip(figures, steps.split(", "), targets, strict=True)
            for figure, of_steps, target in pairs:
                expected, seconds, times = of_ways(results, contender, rate, target)
                count += 1
                if wrong(figure, seconds, times) or not rounded(of_steps, expected):
                    said_wrong.append((contender, rate, target, figure, seconds, times))
    assert said_wrong == []
    assert count >= 48


@pytest.mark.parametrize(
    ("cell", "seconds", "times", "expected"),
    [
        (f"152 s, 2.0{TIMES}", 151.9, 1.99, False),
        (f"152 s, 2.0{TIMES}", 152.6, 1.99, True),
        (f"152 s, 2.1{TIMES}", 152, 1.99, True),
        (f"11{TIMES}", None, 11.4, False),
        (f"11{TIMES}", None, 11.6, True),
    ],
)
def test_what_is_wrong_is_noticed(cell, seconds, times, expected):
    assert wrong(cell, seconds, times) is expected


def test_every_file_of_results_says_what_it_is_from():
    text = (RESULTS / "README.md").read_text()
    files = {path.name for path in RESULTS.iterdir() if path.name != "README.md"}
    assert set(re.findall(r"\]\(([\w.-]+)\)", text)) == files
