"""The runs of convergence, and the file of their outcomes."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from parallel_sgd import UserError
from parallel_sgd.files import write_whole

from .. import study
from .training import FIRST_TUNING_SEED, Outcome, Run, train

T = TypeVar("T")
Line = study.Line[Run, Outcome, T]


class Runs(study.Runs[Run, Outcome]):
    """Runs whose outcomes are kept in a file.

    Args:
        jobs, minutes: see `study.Runs`.
        path: the file, read now and written on the way; None: no file.
        only_read: carry out no run, and do not write the file.
    """

    def __init__(
        self,
        jobs: int = 1,
        path: str | None = None,
        minutes: float | None = None,
        *,
        only_read: bool = False,
    ) -> None:
        known = read(Path(path)) if path else {}
        self.path = None if only_read or not path else Path(path)
        minutes = 0 if only_read else minutes
        super().__init__(train, jobs=jobs, minutes=minutes, known=known)

    def kind(self, run: Run) -> Hashable:
        return run.task, run.ranks

    def save(self) -> None:
        if self.path:
            text = _text(self.outcomes)
            write_whole("--runs", self.path, lambda aside: aside.write_text(text))


def read(path: Path) -> dict[Run, Outcome]:
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
            options = tuple((name, value) for name, value in group.pop("options").items())
            errors = group.pop("errors", {})
            for seed, losses in group.pop("losses").items():
                outcomes[Run(**group, options=options, seed=int(seed))] = Outcome(
                    tuple(losses),
                    sent[seed] if isinstance(sent, dict) else sent,
                    tuple(errors.get(seed, ())),
                )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: these are not the runs of this benchmark: {error}") from None
    return outcomes


def _text(outcomes: dict[Run, Outcome]) -> str:
    """Return a line of JSON for each setting, with all its seeds."""
    groups: dict[Run, dict[str, Any]] = {}
    for run, outcome in sorted(outcomes.items(), key=_order):
        fields = asdict(run)
        del fields["seed"]
        fields["options"] = dict(run.options)
        group = groups.setdefault(replace(run, seed=0), {**fields, "bytes_sent": {}, "losses": {}})
        group["bytes_sent"][run.seed] = outcome.bytes_sent
        points = slice(-1 if run.seed >= FIRST_TUNING_SEED else 0, None)
        group["losses"][run.seed] = outcome.losses[points]
        if outcome.errors:
            group.setdefault("errors", {})[run.seed] = outcome.errors[points]
    for group in groups.values():
        if len(counts := {*group["bytes_sent"].values()}) == 1:
            group["bytes_sent"] = counts.pop()
    return "[\n" + ",\n".join(map(json.dumps, groups.values())) + "\n]\n"


def _order(item: tuple[Run, Outcome]) -> Any:
    run = item[0]
    parts = run.task, run.contender, run.optimizer, run.ranks, run.samples, run.options
    return *parts, run.lr, run.seed
