"""Write a log for every rank, in the run's folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ...errors import UserError
from ...files import append_line, reason
from ...validation import line_of
from .run_folder import require_no_link

FOLDER = "logs"  #: subfolder of a run's folder


class RankLog:
    """The log of one rank: lines with the time. Each line is written whole or not at all.

    Args:
        run: the run's folder, on this rank's disk or on a shared file system.
        rank: the rank's number.

    Local. No file stays open between two lines, so a kill loses no line.
    """

    def __init__(self, run: Path, rank: int) -> None:
        self.path = run / FOLDER / f"rank-{rank:05d}.log"

    def create(self) -> None:
        """Make the folder, and append the first line. Lines of a resumed run stay.

        Raises:
            UserError: the folder cannot be made, or is a link.
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
        """Append a line.

        Raises:
            UserError: the line cannot be written.
        """
        append_line("output", self.path, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def write_error(self, error: BaseException) -> None:
        """Append the error that ends this rank. A failing disk is ignored.

        The error is reported elsewhere, too.
        """
        try:
            self.write(f"error: {type(error).__name__}: {line_of(error)}")
        except UserError:
            return
