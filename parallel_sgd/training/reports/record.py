"""Read the folder of a run: options, rows of metrics, status, and errors of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...files import content_of
from ...validation import checked_path, shown
from ..checkpoint.schema import parsed

OPTIONS = "options.json"  #: marks a run's folder
METRICS = "metrics.jsonl"
STATUS = "status.json"
SUMMARY = "summary.json"
LOGS = "logs"  #: subfolder of the ranks' logs
LOG_END = 65_536  #: bytes read from the end of a log

Points = list[tuple[float, float]]

#: Fields of a row that are numbers but no metrics.
NO_METRICS = {"epoch", "samples", "learning_rate", "minibatch_size", "bytes_sent", "seconds"}


@dataclass(frozen=True)
class RunRecord:
    """The record of a run, from the files in its folder.

    Attributes:
        folder: of the run.
        options: content of options.json.
        rows: of metrics.jsonl, by samples.
        status: content of status.json: "status" (training, complete, failed or preempted), "error",
            "time" of writing, texts of "algorithm" and "optimizer", number of "parameters", and the
            time of all "ranks"; empty if there is no such file.
        summary: content of summary.json; empty if there is no such file.
        errors: lines about errors in the ranks' logs.
    """

    folder: Path
    options: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    status: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    errors: Sequence[str] = ()

    @staticmethod
    def read(path: str | os.PathLike[str], name: str = "run") -> RunRecord:
        """Read a run's folder. Local.

        Args:
            path: the folder.
            name: of the argument, for errors.
        Raises:
            UserError: the folder is not that of a run, or a file in it is damaged.
        """
        folder = checked_path(name, path, "run's folder")
        if not (folder / OPTIONS).is_file():
            raise UserError(
                f"{name}={shown(str(path))} must be the folder of a run: it has no {OPTIONS}"
            )
        return RunRecord(
            folder=folder,
            options=_object(folder / OPTIONS),
            rows=list(_rows(folder / METRICS)),
            status=_object(folder / STATUS) if (folder / STATUS).exists() else {},
            summary=_object(folder / SUMMARY) if (folder / SUMMARY).exists() else {},
            errors=list(_errors(folder / LOGS)),
        )

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.resolve().name

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, the losses first."""
        names = {
            name
            for row in self.rows
            for name, value in row.items()
            if name not in NO_METRICS and _is_number(value)
        }
        return sorted(names, key=lambda name: (not name.endswith("loss"), name))

    def points(self, metric: str, against: str = "samples") -> Points:
        """Return the points (x, y) of a metric against another field of the rows. Local."""
        return [
            (float(row[against]), float(row[metric]))
            for row in self.rows
            if _is_number(row.get(metric)) and _is_number(row.get(against))
        ]

    def speed(self) -> Points:
        """Return the points (samples, samples per second since the row before). Local."""
        points, before = [], (0.0, 0.0)
        for samples, seconds in self.points("seconds"):
            if samples > before[0] and seconds > before[1]:
                points.append((samples, (samples - before[0]) / (seconds - before[1])))
            before = samples, seconds
        return points

    @property
    def samples_per_second(self) -> float | None:
        """The mean speed of all ranks after the first row, in which buffers are first touched."""
        seconds = self.points("seconds")
        if len(seconds) > 2:
            seconds = [(x - seconds[0][0], y - seconds[0][1]) for x, y in seconds]
        if not seconds or seconds[-1][1] <= 0:
            return None
        return seconds[-1][0] / seconds[-1][1]

    def cost_of(self, metric: str, value: float, of: str = "seconds") -> float | None:
        """Return the seconds, or another field, at the first row with a metric of at most `value`.

        Local.
        """
        return next((x for x, y in self.points(metric, of) if y <= value), None)

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        """The time of each rank: "rank", "host" and "seconds" by kind of work.

        Asynchronous workers report their times in the last row's details.
        """
        if ranks := self.status.get("ranks"):
            return list(ranks)
        details = (self.rows[-1].get("details") or {}) if self.rows else {}
        return [
            {"rank": worker["worker"], "host": "", "seconds": worker["seconds"]}
            for worker in details.get("workers", [])
        ]

    @property
    def events(self) -> list[tuple[int, str]]:
        """The actions taken at rows, as pairs of samples and text."""
        return [(row["samples"], row["event"]) for row in self.rows if row.get("event")]


def _object(path: Path) -> Mapping[str, Any]:
    value = _parsed(path, content_of("run", path))
    if not isinstance(value, dict):
        raise UserError(f"{path} must contain a JSON object")
    return value


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.exists():  # the run has ended before its first row
        return
    for number, line in enumerate(content_of("run", path).splitlines(), 1):
        row = _parsed(path, line)
        if not isinstance(row, dict) or not all(_is_number(row.get(key)) for key in ROW):
            raise UserError(f"{path}: line {number} must be a row with {', '.join(ROW)}")
        yield row


ROW = ("epoch", "samples", "bytes_sent", "seconds")  #: numbers that every row has


def _parsed(path: Path, data: bytes) -> Any:
    try:
        return parsed(data)
    except UserError as error:
        raise UserError(f"{path} {error}") from None


def _errors(logs: Path) -> Iterator[str]:
    """Yield the lines about errors at the ends of the ranks' logs, with the rank's number."""
    for path in sorted(logs.glob("rank-*.log")):
        if path.is_symlink():
            continue
        text = content_of("run", path)[-LOG_END:].decode(errors="replace")
        for line in text.splitlines():
            if " error: " in line:
                yield f"rank {path.stem.removeprefix('rank-').lstrip('0') or 0}: {line}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
