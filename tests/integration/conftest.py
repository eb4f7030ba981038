"""Which of these tests say nothing about the MPI."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "any_mpi: what it tests does not depend on the MPI, so `make test` runs it on MPICH alone",
    )
