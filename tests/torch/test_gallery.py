"""The examples of the gallery that torchrun starts: they print and draw what their pages show."""

from __future__ import annotations

from pathlib import Path

import gallery_runs
import pytest


@pytest.mark.parametrize("name", gallery_runs.names("torchrun"))
def test_an_example(name: str, tmp_path: Path) -> None:
    gallery_runs.check(name, tmp_path)
