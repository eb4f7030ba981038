"""A log of every rank, in the folder of its run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ...errors import UserError
from ...files import append_line, reason
from ...validation import line_of
from .run_folder import require_no_link

FOLDER = "logs"  #: in a run's


class RankLog:
    """The log of one rank: lines with the time, each whole or not there at all.

    Args:
        run: the run's folder, on this rank's own disk or on one that all share.
        rank: its number.

    Local. Nothing is open between two lines, so that a kill loses none of them.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.path = run / FOLDER / f"rank-{rank:05d}.log"

    def create(self) -> None:
        """Make the folder; what the log of a run that goes on holds stays.

        Raises:
            UserError: it cannot be made, or is a link.
        """
        require_no_link(self.path.parent)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"output={str(self.path.parent)!r} must be a folder: {reason(error)}"
            ) from error
        self.write(f"begin: process {os.getpid()} on {os.uname().nodename}")

    def write(self, text: str) -> None:
        """Add a line.

        Raises:
            UserError: it cannot be written.
        """
        append_line("output", self.path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def write_error(self, error: BaseException) -> None:
        """Add why this rank ends, if the disk lets it: the error is told elsewhere, too."""
        try:
            self.write(f"error: {type(error).__name__}: {line_of(error)}")
        except UserError:
            return
