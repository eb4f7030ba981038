"""Compare several runs, as a table of text and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from .charts import line_chart, number
from .page import SAMPLES, figure, in_words, page, table, value_in_words
from .record import RunRecord

MOST_LINES = 6  #: runs drawn in a chart


def comparison_table(runs: Sequence[RunRecord]) -> str:
    """Return a table of the runs as lines of text, with each run's name last. Local."""
    header, rows = _table(runs)
    names = [name.removeprefix(">") for name in header]
    widths = [max(len(text) for text in column) for column in zip(names, *rows, strict=True)]
    lines = []
    for row in [names, *rows]:
        numbers = [f"{t:>{w}s}" for t, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"{row[0]:{widths[0]}s}", *numbers]).rstrip())
    return "\n".join(lines)


def relative_to_first(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line for each run but the first: what a loss cost it, beside the first run's cost.

    The loss is the level in the last column of `comparison_table`. A run is left out if one of the
    two runs took no time or sent nothing. Local.
    """
    metric = common_metric(runs)
    if metric is None:
        return []
    level, first = reached_by_all(runs, metric), runs[0]
    lines = []
    for run in runs[1:]:
        first_s, seconds = (r.cost_of(metric, level) for r in (first, run))
        first_sent, sent = (r.cost_of(metric, level, "bytes_sent") for r in (first, run))
        if first_s and seconds and first_sent and sent:
            times, share = first_s / seconds, 100 * sent / first_sent
            lines.append(
                f"{run.name} reached a {in_words(metric)} of {level:.4f} {times:.1f} times as fast "
                f"as {first.name}, with {share:.1f} % of its bytes"
            )
    return lines


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return a page comparing runs, as HTML. Local."""
    header, rows = _table(runs)
    parts = [
        f"<h1>{len(runs)} runs</h1>",
        table(header, rows),
        f'<p class="weak">{_explanation(runs)}</p>',
        *(f"<p>{escape(line)}.</p>" for line in relative_to_first(runs)),
        f'<div class="charts">{"".join(_charts(runs[:MOST_LINES]))}</div>',
    ]
    if len(runs) > MOST_LINES:
        parts.insert(-1, f'<p class="weak">The charts show the first {MOST_LINES} runs.</p>')
    parts += ["<h2>Methods</h2>", table(["run", "method"], [(r.name, _method(r)) for r in runs])]
    return page(f"{len(runs)} runs", parts)


def _method(run: RunRecord) -> str:
    texts = run.status.get("algorithm"), run.status.get("optimizer")
    return ", ".join(str(text) for text in texts if text) or "unknown"


def common_metric(runs: Sequence[RunRecord]) -> str | None:
    """Return the name of a loss common to all runs: validation or test first. Local."""
    for name in ("validation_loss", "test_loss", "train_loss"):
        if all(run.points(name, "seconds") for run in runs):
            return name
    return None


def reached_by_all(runs: Sequence[RunRecord], metric: str) -> float:
    """Return the lowest value of a metric reached by every run. Local."""
    return max(min(y for _, y in run.points(metric)) for run in runs)


def _table(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    common = common_metric(runs)
    metrics = [m for m in runs[0].metrics if all(run.points(m) for run in runs)]
    if common != "train_loss":  # of two losses the one of data that the model was not trained on
        metrics = [m for m in metrics if m != "train_loss"]
    level = reached_by_all(runs, common) if common else None
    header = ["run", ">ranks", *(f">{in_words(m)}" for m in metrics), ">seconds", ">samples/s"]
    header.append(">MB sent")
    if common and level is not None:
        header.append(f">s to {level:.4f}")
    rows = []
    for run in runs:
        last = run.rows[-1] if run.rows else {}
        speed = run.samples_per_second
        row = [
            run.name,
            str(run.options.get("ranks", "")),
            *(value_in_words(m, run.points(m)[-1][1]) for m in metrics),
            f"{last['seconds']:,.2f}" if last else "",
            number(speed) if speed is not None else "",
            f"{last['bytes_sent'] / 1e6:,.1f}" if last else "",
        ]
        if common and level is not None:
            seconds = run.cost_of(common, level)
            row.append("" if seconds is None else f"{seconds:,.2f}")
        rows.append(row)
    return header, rows


def _explanation(runs: Sequence[RunRecord]) -> str:
    common = common_metric(runs)
    if common is None:
        return "These runs have no loss in common."
    return (
        f"The last column: seconds of training to the lowest {in_words(common)} that every run "
        "has reached."
    )


def _charts(runs: Sequence[RunRecord]) -> Iterable[str]:
    metric = common_metric(runs)
    if metric is None:
        return
    name = in_words(metric)
    for against, label, factor in (
        ("seconds", "seconds of training", 1.0),
        ("bytes_sent", "megabytes sent by all ranks", 1e-6),
        ("samples", SAMPLES, 1.0),
    ):
        series = {
            run.name: [(x * factor, y) for x, y in run.points(metric, against)] for run in runs
        }
        yield figure(f"{name.capitalize()} against {label}", line_chart(series, label, name))
    speeds = {run.name: run.speed() for run in runs}
    yield figure("Speed", line_chart(speeds, SAMPLES, "samples per second"))
