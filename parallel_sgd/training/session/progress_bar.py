"""A bar on the terminal that shows how far training has come."""

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
    """Whether somebody looks at a terminal while this program runs. Local."""
    return output_is_terminal() or os.environ.get(TERMINAL) == "1"


class ProgressBar:
    """Samples of all ranks, their pace, and when they will all have been seen.

    Args:
        total: samples of all ranks in the whole of training.
        begin: samples that have been seen.
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
        """So many samples have been seen. Some nanoseconds, but for a few times a second."""
        if samples != self._bar.n:
            self._bar.update(samples - self._bar.n)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """For a `with` block that prints: the bar is away meanwhile, and what is printed goes where
        the bar was. (By two streams it could come before the bar has gone.)"""
        self._bar.clear()
        with redirect_stdout(sys.stderr):
            yield
        self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


def require_tqdm() -> Any:
    """The module that draws the bar.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("tqdm")
    except ImportError as error:
        raise UserError(
            f"a progress bar needs tqdm ({error}): pip install '.[train]' from the checkout, or "
            "leave it out with --no-progress-bar"
        ) from error
