"""The file of runs and their outcomes: JSON, a line for each setting with all its seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel_sgd import UserError
from parallel_sgd.files import write_whole

from .training import Outcome, Run


def load(path: Path) -> dict[Run, Outcome]:
    """Read the outcomes in a file; none if the file does not exist.

    Raises:
        UserError: it is not such a file.
    """
    if not path.exists():
        return {}
    outcomes = {}
    try:
        for group in json.loads(path.read_text()):
            sent = group.pop("bytes_sent")  # of all seeds alike, or by seed
            group["options"] = tuple(group["options"].items())
            for seed, losses in group.pop("losses").items():
                count = sent[seed] if isinstance(sent, dict) else sent
                outcomes[Run(**group, seed=int(seed))] = Outcome(tuple(losses), count)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: these are not the runs of this benchmark: {error}") from None
    return outcomes


def write(path: Path, outcomes: Mapping[Run, Outcome]) -> None:
    """Write outcomes, in the same order whatever the order of the runs."""
    groups: dict[str, dict[str, Any]] = {}
    for run in sorted(outcomes, key=_order):
        outcome, fields = outcomes[run], {**asdict(run), "options": dict(run.options)}
        seed = fields.pop("seed")
        group = groups.setdefault(json.dumps(fields), {**fields, "bytes_sent": {}, "losses": {}})
        group["bytes_sent"][seed], group["losses"][seed] = outcome.bytes_sent, outcome.losses
    for group in groups.values():
        if len(counts := {*group["bytes_sent"].values()}) == 1:
            group["bytes_sent"] = counts.pop()
    text = "[\n" + ",\n".join(map(json.dumps, groups.values())) + "\n]\n"
    write_whole("--runs", path, lambda aside: aside.write_text(text))


def _order(run: Run) -> Any:
    parts = run.task, run.contender, run.optimizer, run.ranks, run.samples, run.options
    return *parts, run.lr, run.seed
