"""Make the page about one run: report.html, a single file without scripts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .charts import bar_chart, line_chart, number
from .record import Points, RunRecord

#: Kinds of a rank's time, in the order of the bars, and their names on the page.
KINDS = {
    "compute": "compute",
    "exchange": "exchange and wait",
    "update": "update",
    "evaluate": "evaluate",
    "checkpoint": "checkpoint",
    "wait": "wait",
    "wire": "send and receive",
    "apply": "apply",
}
MOST_RANKS = 32  #: ranks drawn; of more ranks, those that wait least and most
SAMPLES = "samples seen by all ranks"

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --weak: #5d6470; --line: #d9dce1; --back: #fff }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --weak: #9aa3af; --line: #3a4048; --back: #16181c }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 1180px; margin: 0 auto; padding: 20px }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .3rem 0 } .weak { color: var(--weak) } code, pre { font-size: .87rem }
.tiles { display: flex; flex-wrap: wrap; gap: 10px; margin: 1rem 0 }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: 8px 14px }
.tile b { display: block; font-size: 1.25rem } .tile span { color: var(--weak) }
.charts { display: grid; gap: 12px 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)) }
figure { margin: 0 } figcaption { font-weight: 600 } svg { width: 100%; max-width: 620px }
svg text { font: 12px system-ui, sans-serif; fill: var(--text) }
svg text[fill] { fill: revert-layer } svg .axis { fill: var(--weak) }
svg .grid { stroke: var(--line) } svg polyline { fill: none; stroke-width: 1.8 }
.scroll { overflow-x: auto } table { border-collapse: collapse }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line);
  vertical-align: top } td.number, th.number { text-align: right }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
"""


def run_page(run: RunRecord) -> str:
    """Return the page about a run, as HTML. Local."""
    last = run.rows[-1] if run.rows else {}
    parts = [
        f"<h1>{escape(run.name)}</h1>",
        f"<p>{escape(_method(run))}</p>",
        f'<p class="weak">{escape(_status(run))}</p>',
        f'<div class="tiles">{"".join(_tiles(run, last))}</div>',
        f'<div class="charts">{"".join(_charts(run))}</div>',
        *_times(run),
        "<h2>Skipped, restored, failed</h2>",
        *_incidents(run, last),
        *_results(run),
        *_options(run),
    ]
    return page(f"Run {run.name}", parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole HTML page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def figure(caption: str, chart: str) -> str:
    """Return a chart with its caption, or nothing without a chart."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>" if chart else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts. Columns after the first are aligned right if the header says so by
    a leading ">"."""
    aligned = [' class="number"' if name.startswith(">") else "" for name in header]

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{css}>{escape(text)}</{tag}>" for css, text in zip(aligned, texts, strict=True)
        )

    head = cells("th", [name.removeprefix(">") for name in header])
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def in_words(name: str) -> str:
    """Return a metric's name in words."""
    return name.replace("_", " ")


def value_in_words(name: str, value: float) -> str:
    """Return a metric's value as a text."""
    return f"{100 * value:.2f} %" if "accuracy" in name else f"{value:.4f}"


def _method(run: RunRecord) -> str:
    texts = [run.status.get("algorithm"), run.status.get("optimizer")]
    ranks = run.options.get("ranks")
    texts.append(f"{ranks} ranks" if ranks else None)
    if parameters := run.status.get("parameters"):
        texts.append(f"{parameters:,} parameters")
    return " · ".join(str(text) for text in texts if text)


def _status(run: RunRecord) -> str:
    status, at = run.status.get("status"), run.status.get("time")
    texts = {
        "training": f"In training when this page was written, {at}.",
        "complete": f"Complete, {at}.",
        "preempted": f"Asked to leave, with all state saved, {at}. Can be resumed.",
        "failed": f"Failed, {at}: {run.status.get('error')}",
    }
    return texts.get(str(status), "No status was recorded.")


def _tiles(run: RunRecord, last: Mapping[str, Any]) -> Iterable[str]:
    def tile(name: str, value: str) -> str:
        return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'

    for name in run.metrics:
        if last.get(name) is not None:
            yield tile(in_words(name), value_in_words(name, last[name]))
    if (speed := run.samples_per_second) is not None:
        yield tile("samples per second, all ranks", number(speed))
    if last:
        yield tile("seconds of training", f"{last['seconds']:,.1f}")
        yield tile("epochs", f"{last['epoch']:g}")
    if sent := last.get("bytes_sent"):
        yield tile("megabytes sent, all ranks", f"{sent / 1e6:,.1f}")
        if full := run.summary.get("bytes_in_32_bit"):
            yield tile("times as much in 32 bits", f"{full / sent:.1f}")


def _charts(run: RunRecord) -> Iterable[str]:
    losses = {in_words(name): run.points(name) for name in run.metrics if name.endswith("loss")}
    yield figure("Loss", line_chart(losses, SAMPLES, "loss"))
    for name in run.metrics:
        if not name.endswith("loss"):
            chart = line_chart({in_words(name): run.points(name)}, SAMPLES, in_words(name))
            yield figure(in_words(name).capitalize(), chart)
    yield figure("Speed", line_chart({"all ranks": run.speed()}, SAMPLES, "samples per second"))
    sent = [(x, y / 1e6) for x, y in run.points("bytes_sent")]
    if any(y for _, y in sent):
        yield figure(
            "Bytes", line_chart({"all ranks": sent}, SAMPLES, "megabytes sent", linear=True)
        )
    for field in ("learning_rate", "minibatch_size"):
        if len({y for _, y in run.points(field)}) > 1:
            name = in_words(field)
            chart = line_chart({name: _stepped(run.points(field))}, SAMPLES, name)
            yield figure(name.capitalize(), chart)


def _stepped(points: Points) -> Points:
    """Return the points with a step before each change."""
    corners = [(after[0], before[1]) for before, after in itertools.pairwise(points)]
    return [point for pair in zip(points, corners, strict=False) for point in pair] + points[-1:]


def _times(run: RunRecord) -> Iterable[str]:
    ranks = [rank for rank in run.ranks if rank["seconds"]]
    if not ranks:
        return
    yield "<h2>Where the time went, by rank</h2>"
    shown = ranks
    if len(ranks) > MOST_RANKS:
        by_wait = sorted(ranks, key=lambda rank: rank["seconds"].get("exchange", 0.0))
        half = MOST_RANKS // 2
        shown = by_wait[:half] + by_wait[-half:]
        yield (
            f'<p class="weak">Of {len(ranks)} ranks, the {half} that exchanged and waited least, '
            f"and the {half} that did so longest.</p>"
        )
    present = {kind for rank in ranks for kind in rank["seconds"]}
    kinds = {kind: name for kind, name in KINDS.items() if kind in present}
    bars = {
        f"rank {rank['rank']}{_on(rank)}": {
            name: rank["seconds"].get(kind, 0.0) for kind, name in kinds.items()
        }
        for rank in shown
    }
    yield f"<figure>{bar_chart(bars, list(kinds.values()), 's')}</figure>"
    yield (
        '<p class="weak">Seconds since the latest start. The time in exchanges includes waits for '
        "slower ranks.</p>"
    )


def _on(rank: Mapping[str, Any]) -> str:
    return f" {rank['host']}" if rank["host"] else ""


def _incidents(run: RunRecord, last: Mapping[str, Any]) -> Iterable[str]:
    rows: list[Sequence[str]] = [(f"{samples:,} samples", event) for samples, event in run.events]
    details = last.get("details") or {}
    for name in ("skipped", "recovery"):
        if details.get(name):
            rows.append((in_words(name), json.dumps(details[name])))
    rows += [line.split(": ", 1) for line in run.errors]
    yield table(["at", "event"], rows) if rows else '<p class="weak">Nothing.</p>'


def _results(run: RunRecord) -> Iterable[str]:
    """Yield the table of the summary, if the run was compared with serial SGD."""
    rows = {name: row for name, row in run.summary.items() if isinstance(row, dict)}
    if len(rows) < 2:
        return
    metrics = [name for name in run.metrics if any(name in row for row in rows.values())]
    yield "<h2>Results</h2>"
    yield table(
        ["", *(f">{in_words(name)}" for name in metrics), ">seconds"],
        [
            [
                label,
                *(value_in_words(m, row[m]) if row.get(m) is not None else "" for m in metrics),
                f"{row['seconds']:.2f}",
            ]
            for label, row in rows.items()
        ],
    )


def _options(run: RunRecord) -> Iterable[str]:
    changed = run.options.get("changed")
    if isinstance(changed, dict) and changed:
        yield "<h2>Options that differ from the defaults</h2>"
        yield table(["option", "value"], [(name, str(value)) for name, value in changed.items()])
    text = escape(json.dumps(dict(run.options), indent=2))
    yield f"<h2>All options</h2><details><summary>options.json</summary><pre>{text}</pre></details>"
