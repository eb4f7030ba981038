"""Where these tests run, and which of them say nothing about the MPI."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, in which the test's own process is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "any_mpi: what it tests does not depend on the MPI, so `make test` runs it on MPICH alone",
    )
    config.addinivalue_line(
        "markers", "open_mpi: what no other MPI can do, so `make test` runs it on Open MPI alone"
    )
