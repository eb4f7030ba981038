"""Show the progress of training on the terminal, or in a notebook."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from ...communication.job_environment import TERMINAL, output_is_terminal
from ...errors import UserError


def on_terminal() -> bool:
    """Return whether this program's output goes to a terminal. Local."""
    return output_is_terminal() or os.environ.get(TERMINAL) == "1"


def in_notebook() -> bool:
    """Return whether this program is a kernel of Jupyter, with cells for its output. Local."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class ProgressBar:
    """Shows samples of all ranks, their rate, and the time left.

    In a notebook the bar is a widget if ipywidgets is installed, else text. The bar stays there; on
    a terminal the bar is removed in the end.

    Args:
        total: samples of all ranks in the whole of training.
        begin: samples seen so far.
    Raises:
        UserError: tqdm is not installed.

    Local.
    """

    def __init__(self, total: int, begin: int) -> None:
        tqdm, notebook = require_tqdm(), in_notebook()
        self._is_widget = notebook and importlib.util.find_spec("ipywidgets") is not None
        if self._is_widget:
            tqdm = importlib.import_module("tqdm.notebook")
        self._stream = sys.stdout if notebook else sys.stderr  # a notebook shows stderr as an error
        self._bar: Any = tqdm.tqdm(
            total=total,
            initial=begin,
            unit=" samples",
            unit_scale=True,
            file=self._stream,
            leave=notebook,
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
        if self._is_widget:
            yield
            return
        self._bar.clear()
        with nullcontext() if self._stream is sys.stdout else redirect_stdout(self._stream):
            yield
        self._bar.refresh()

    def close(self) -> None:
        """Remove the bar, or in a notebook leave it as it is."""
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
