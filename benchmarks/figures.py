"""Figures of reports, drawn from the rows alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from parallel_sgd.training import require_matplotlib

from .panels import Axes, head, plain_log, save
from .report import DrawnReport, Report, Row

Drawing = Callable[[Report], Any]  #: to matplotlib's figure

OURS, THEIRS, LIMIT = "#2f6da8", "#d08a3c", "#888888"
BAND = 0.25  #: of the measured: what a prediction is drawn to be off by

#: What a unit is called on an axis.
UNITS = {
    "ms": "milliseconds",
    "us": "microseconds",
    "s": "seconds",
    "B": "bytes",
    "/s": "per second",
    "M/s": "million rows per second",
    "bits/value": "bits a value",
    "ns/value": "nanoseconds a value",
    "GB/s": "gigabytes of memory per second",
    "MB/s": "megabytes per second",
    "G values/s": "billion values per second",
    "nats": "test loss, nats",
    "times": "times",
    "B/parameter": "bytes per parameter",
}


def beside_references(report: Report) -> Any:
    """Draw a panel for each unit: measured values, each beside its peer or limit."""
    rows = [row for row in report.rows if row.ratio]
    units = [unit for unit in dict.fromkeys(row.unit for row in rows) if unit in UNITS]
    panels = [[row for row in rows if row.unit == unit] for unit in units]
    figure, grid = _figure(report, [len(panel) for panel in panels])
    for axes, unit, those in zip(grid, units, panels, strict=True):
        for y, row in enumerate(reversed(those)):
            assert row.ratio
            reference = row.value / row.ratio
            axes.plot([row.value, reference], [y, y], color="#cccccc", zorder=1)
            axes.plot(reference, y, "|", color=THEIRS, markersize=13, markeredgewidth=2.5)
            axes.plot(row.value, y, "o", color=OURS, markersize=6)
        _label(axes, those)
        values = [v for row in those for v in (row.value, row.value / (row.ratio or 1)) if v > 0]
        if max(values) > 8 * min(values):
            axes.set_xscale("log")
            plain_log(axes.xaxis)
        else:
            axes.set_xlim(0, 1.05 * max(values))
        axes.set_xlabel(UNITS[unit])
    grid[0].plot([], [], "o", color=OURS, label="measured")
    grid[0].plot(
        [], [], "|", color=THEIRS, markersize=13, markeredgewidth=2.5, label="what it is beside"
    )
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    return figure


def predictions(report: Report) -> Any:
    """Draw measured against predicted times; the line of equality, and a band around it."""
    figure, axes = require_matplotlib().subplots(figsize=(7.5, 7), layout="constrained")
    points: list[tuple[list[float], Row]] = [
        ([float(part) for part in parts], row)
        for row in report.rows
        if (parts := _numbers(r"(\d+) hosts, ([\d.]+) MB, (\d+) bit", row.name)) and row.ratio
    ]
    ends = [min(row.value for _, row in points) / 2, max(row.value for _, row in points) * 2]
    axes.plot(ends, ends, color="black", linewidth=1, label="as predicted")
    low, high = ([x * (1 + off) for x in ends] for off in (-BAND, BAND))
    axes.fill_between(ends, low, high, color="#dddddd", label=f"within {BAND:.0%}")
    colors = dict(zip(sorted({bits for (_, _, bits), _ in points}), _colors(), strict=False))
    markers = dict(zip(sorted({hosts for (hosts, _, _), _ in points}), "os^Dv*", strict=False))
    for (hosts, megabytes, bits), row in points:
        assert row.ratio
        place = (row.value / row.ratio, row.value)
        size = 5 + 2 * math.log10(max(megabytes, 1))
        axes.plot(*place, markers[hosts], color=colors[bits], markersize=size, alpha=0.85)
    for bits, color in colors.items():
        axes.plot([], [], "s", color=color, label=f"{bits:g} bit")
    for hosts, marker in markers.items():
        axes.plot([], [], marker, color="black", fillstyle="none", label=f"{hosts:g} hosts")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted, milliseconds")
    axes.set_ylabel("measured, milliseconds; the larger a mark, the larger the vector")
    axes.legend(frameon=False)
    head(figure, report.title)
    return figure


def by_size(report: Report) -> Any:
    """Draw the time of a sum by the vector's size, for each variant; and the links' limit."""
    figure, axes = require_matplotlib().subplots(figsize=(8.5, 6.5), layout="constrained")
    variants: dict[str, list[tuple[float, Row]]] = {}
    for row in report.rows:
        parts = re.match(r"([\d.]+) MB, (.*)", row.name)
        if parts and row.unit == "ms":
            variant = re.sub(r"auto.*", "auto", parts[2])
            variants.setdefault(variant, []).append((float(parts[1]), row))
    colors = dict(zip(("32 bit", "8 bit", "4 bit", "2 bit", "1 bit"), _colors(), strict=False))
    limits = set()
    for variant, rows in variants.items():
        sizes = [size for size, _ in rows]
        bits = variant.split(",")[0]
        color = colors.get(bits, {"auto": "black", "gloo": "#8c564b"}.get(variant, LIMIT))
        style = "-o" if "pipelined" in variant else "--s" if "collective" in variant else ":^"
        axes.plot(sizes, [row.value for _, row in rows], style, color=color, label=variant)
        if bits in colors and bits not in limits:
            limits.add(bits)
            ideal = [row.value / (row.ratio or 1) for _, row in rows]
            axes.plot(sizes, ideal, color=color, linewidth=6, alpha=0.2)
    axes.plot([], [], color=LIMIT, linewidth=6, alpha=0.3, label="what the links allow")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("megabytes of float32")
    axes.set_ylabel("milliseconds")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    head(figure, report.title)
    return figure


def by_bits(report: Report) -> Any:
    """Draw the time and bytes of a sum, by bits, beside MPI_Allreduce and the theory."""
    pyplot = require_matplotlib()
    figure, (times, sizes) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    kinds = {"collective": "time", "pipelined": "transport pipelined, time"}
    for (kind, said), style in zip(kinds.items(), ("-o", "--s"), strict=True):
        rows = _by_bits(report, said)
        times.plot(range(len(rows)), [row.value for _, row in rows], style, label=kind)
    peers = [row.value / row.ratio for _, row in _by_bits(report, "time") if row.ratio]
    times.axhline(peers[0], color=THEIRS, label="MPI_Allreduce of float32")
    times.set_ylim(0)
    times.set_ylabel("milliseconds")
    sent = _by_bits(report, "bytes sent by a rank")
    sizes.bar(range(len(sent)), [row.value / 1e6 for _, row in sent], color=OURS, label="sent")
    theory = [row.value / (row.ratio or 1) / 1e6 for _, row in sent]
    sizes.plot(range(len(sent)), theory, "_", color=THEIRS, markersize=30, label="theory")
    sizes.set_yscale("log")
    plain_log(sizes.yaxis)
    sizes.set_ylabel("megabytes sent by a rank")
    for axes in (times, sizes):
        axes.set_xticks(range(len(sent)), [f"{bits}" for bits, _ in sent])
        axes.set_xlabel("bits")
        axes.legend(frameon=False)
    head(figure, report.title)
    return figure


def pairs(report: Report) -> Any:
    """Draw every seed's loss beside serial SGD; and the mean difference in its margin."""
    pyplot = require_matplotlib()
    figure, (losses, margin) = pyplot.subplots(
        1, 2, figsize=(11, 5), layout="constrained", width_ratios=(1.2, 1)
    )
    seeds = [row for row in report.rows if row.name.startswith("seed")]
    serial, ours = zip(*((row.value / (row.ratio or 1), row.value) for row in seeds), strict=True)
    ends = [0.95 * min(serial + ours), 1.05 * max(serial + ours)]
    losses.plot(ends, ends, color="black", linewidth=1, label="equal")
    losses.plot(serial, ours, "o", color=OURS, label="a seed")
    losses.set_xlabel("test loss of serial SGD, nats")
    losses.set_ylabel("test loss of ranks at few bits, nats")
    losses.legend(frameon=False)
    (mean,) = (row for row in report.rows if row.name.startswith("mean difference"))
    said = _numbers(r"margin ±([\d.]+); (\d+) % interval ([+-][\d.]+) to ([+-][\d.]+)",
                    mean.reference)  # fmt: skip
    assert said
    allowed, percent, low, high = map(float, said)
    differences = [one - other for one, other in zip(ours, serial, strict=True)]
    margin.axvspan(-allowed, allowed, color="#dddddd", label=f"margin ±{allowed:g}")
    margin.plot(differences, range(len(differences)), "o", color=OURS, label="a seed")
    off = [[mean.value - low], [high - mean.value]]
    margin.errorbar(mean.value, -1.5, xerr=off, fmt="D", color=THEIRS, capsize=4,
                    label=f"mean, {percent:g} % interval")  # fmt: skip
    margin.axvline(0, color="black", linewidth=1)
    margin.set_yticks(range(len(differences)), [row.name.split(",")[0] for row in seeds])
    margin.locator_params(axis="x", nbins=5)
    margin.set_xlabel("difference in test loss, nats")
    margin.legend(frameon=False, loc="upper left")
    head(figure, report.title)
    return figure


def _by_bits(report: Report, what: str) -> list[tuple[float, Row]]:
    names = {row.name: row for row in report.rows}
    all_bits = [0.25, 0.5, 1, 2, 4, 8, 16, 32]
    return [(bits, names[name]) for bits in all_bits if (name := f"{bits} bit, {what}") in names]


def _numbers(pattern: str, text: str) -> tuple[str, ...] | None:
    match = re.search(pattern, text)
    return match and match.groups()


def _colors() -> Sequence[str]:
    return ("#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#ff7f0e", "#17becf")


def _label(axes: Axes, rows: Sequence[Row]) -> None:
    """Write the rows' names on the left; on the right ratio and reference."""
    axes.set_yticks(range(len(rows)), [row.name for row in reversed(rows)], fontsize=9)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x", alpha=0.3)
    for y, row in enumerate(reversed(rows)):
        text = f"{row.ratio:.3g} of {row.reference}"
        axes.text(1.01, y, text, va="center", size=8, transform=axes.get_yaxis_transform())


def _figure(report: Report, heights: Sequence[int]) -> tuple[Any, Sequence[Axes]]:
    figure, grid = require_matplotlib().subplots(
        len(heights),
        1,
        figsize=(12, sum(0.3 * height + 0.8 for height in heights) + 0.6),
        height_ratios=[height + 1 for height in heights],
        layout="constrained",
        squeeze=False,
    )
    head(figure, report.title)
    return figure, list(grid.flat)


#: By the names of rows, the first that fits.
DRAWINGS: tuple[tuple[str, Drawing], ...] = (
    (r"\d+ hosts, [\d.]+ MB, ", predictions),
    (r"[\d.]+ MB, ", by_size),
    (r"\d+ bit, time$", by_bits),
    (r"seed \d+, ", pairs),
    ("", beside_references),
)


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Draw a report's own figures, or else its rows."""
    if isinstance(report, DrawnReport):
        report.draw(path)
        return
    names = [row.name for row in report.rows]
    drawing = next(d for start, d in DRAWINGS if any(re.match(start, name) for name in names))
    save(drawing(report), path)
