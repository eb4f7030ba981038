"""The examples of the gallery run, and print and draw what their pages show.

Those that need `.venv/torch` are in tests/torch/test_gallery.py.
"""

from __future__ import annotations

from pathlib import Path

import gallery_runs
import pytest


@pytest.mark.any_mpi
@pytest.mark.parametrize("name", gallery_runs.names("mpi"))
def test_an_example(name: str, folder: Path) -> None:
    gallery_runs.check(name, folder)
