"""Modules that tests share lie beside them: `kernel_cases`, `invariants`, `jobs`, and others."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAYERS = [HERE / layer for layer in ("unit", "processes", "parallel", "integration")]

sys.path[:0] = map(str, (HERE, *LAYERS))

# Before anything imports them: what their assertions compare is then shown.
SHARED = [file for layer in LAYERS for file in layer.glob("*.py") if file.stem != "conftest"]
pytest.register_assert_rewrite(*(f.stem for f in SHARED if not f.stem.startswith("test_")))

pytest_plugins = ("limits",)

# As the launcher does for ranks: each of the threads that play them would have PyTorch start more.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this process makes its temporary files: the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug on these tests; each flush could take the time of many."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
