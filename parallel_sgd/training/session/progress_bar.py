"""Show the progress of training on the terminal."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from ...communication.job_environment import TERMINAL, output_is_terminal
from ...errors import UserError


def on_terminal() -> bool:
    """Return whether this program's output goes to a terminal. Local."""
    return output_is_terminal() or os.environ.get(TERMINAL) == "1"


class ProgressBar:
    """Shows samples of all ranks, their rate, and the time left.

    Args:
        total: samples of all ranks in the whole of training.
        begin: samples seen so far.
    Raises:
        UserError: tqdm is not installed.

    Local.
    """

    def __init__(self, total: int, begin: int) -> None:
        self._bar: Any = require_tqdm().tqdm(
            total=total,
            initial=begin,
            unit=" samples",
            unit_scale=True,
            file=sys.stderr,
            leave=False,
            dynamic_ncols=True,
        )

    def show(self, samples: int) -> None:
        """Show the samples seen. Cost: some nanoseconds, except for a few redraws a second."""
        if samples != self._bar.n:
            self._bar.update(samples - self._bar.n)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar for a `with` block that prints, and print to the bar's stream.

        On another stream the text could appear before the bar is gone.
        """
        self._bar.clear()
        with redirect_stdout(sys.stderr):
            yield
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def require_tqdm() -> Any:
    """Import tqdm.

    Raises:
        UserError: tqdm is not installed.
    """
    try:
        return importlib.import_module("tqdm")
    except ImportError as error:
        raise UserError(
            f"a progress bar needs tqdm ({error}): pip install '.[train]' from the checkout, or "
            "turn the bar off with --no-progress-bar"
        ) from error
