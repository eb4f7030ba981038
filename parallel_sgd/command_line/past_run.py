"""A finished run as a source for a plan: its algorithm, size, curve and speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..algorithms import Algorithm
from ..data.readers.files import npz_member, npz_names
from ..errors import UserError
from ..files import content_of
from ..training.checkpoint.schema import parsed
from ..training.reports.record import METRICS, OPTIONS
from ..training.session.initial_model import MODEL
from ..training.session.run_folder import CONFIG
from ..validation import checked_path, integer, one_number, shown
from .train.arguments import read

LOSSES = "validation_loss", "test_loss"  #: in the order of preference


@dataclass(frozen=True)
class PastRun:
    """A finished run of train.py.

    Attributes:
        folder: of the run.
        algorithm: with its options.
        trainers: number of ranks that trained.
        minibatch: samples of all ranks in a step.
        parameters: number of values of the model.
        loss: name of the loss in `points`.
        points: (samples, loss) of every row with a loss.
        step_s: seconds of a step, from the first row to the last; None with a single row.
    """

    folder: Path
    algorithm: Algorithm[Any]
    trainers: int
    minibatch: int
    parameters: int
    loss: str
    points: list[tuple[int, float]]
    step_s: float | None

    @staticmethod
    def read(name: str, path: str) -> PastRun:
        """Read the folder of a run.

        Args:
            name: of the option, for errors.
            path: of the folder.
        Raises:
            UserError: the folder is not that of a finished run of train.py, or minibatches have
                changed in size.
        """
        folder = checked_path(name, path, "run's folder")
        for file in (OPTIONS, CONFIG, METRICS, MODEL):
            if not (folder / file).is_file():
                raise UserError(
                    f"{name}={shown(path)} must be the folder of a finished run of train.py: it "
                    f"has no {file}"
                )
        facts = parsed(content_of(OPTIONS, folder / OPTIONS))
        rows = [parsed(line) for line in content_of(METRICS, folder / METRICS).splitlines()]
        try:
            # Earlier runs have no "trainers": each of their workers was a single rank.
            trainers = integer("trainers", facts.get("trainers", facts["workers"]), 1)
            sizes = {integer("minibatch_size", row["minibatch_size"], 1) for row in rows}
            loss = next((loss for loss in LOSSES if any(loss in row for row in rows)), LOSSES[-1])
            points = [
                (integer("samples", row["samples"], 0), one_number(loss, row[loss]))
                for row in rows
                if loss in row
            ]
            step_s = _step_s(rows, min(sizes))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{folder}: a row of {METRICS} is not as required: {error!r}") from None
        if len(sizes) > 1:
            raise UserError(
                f"{name}={shown(path)} must have minibatches of one size: it has {sorted(sizes)}"
            )
        _, algorithm, _ = read([str(folder / CONFIG)])
        model = folder / MODEL
        parameters = sum(npz_member(model, member).size for member in npz_names(model))
        return PastRun(folder, algorithm, trainers, min(sizes), parameters, loss, points, step_s)


def _step_s(rows: list[Mapping[str, Any]], minibatch: int) -> float | None:
    """Return the seconds of a step after the first row, in which kernels are compiled."""
    steps = (rows[-1]["samples"] - rows[0]["samples"]) / minibatch
    return float(rows[-1]["seconds"] - rows[0]["seconds"]) / steps if steps > 0 else None
