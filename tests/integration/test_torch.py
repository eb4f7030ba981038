"""Jobs that train a PyTorch model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from jobs import PARALLEL_SGD, SECONDS, TORCH, executed
from limits import patience


@pytest.mark.any_mpi
@pytest.mark.parametrize("way", ["learner", "overlap", "ddp"])
def test_an_error_in_backward_on_one_rank_ends_the_job(folder: Path, way: str) -> None:
    start = time.monotonic()
    code, output = executed((*PARALLEL_SGD, "run", "-n", "2", TORCH, way, "fail"))
    assert code != 0
    assert "ZeroDivisionError: division by zero" in output
    assert "done" not in output
    assert time.monotonic() - start < SECONDS * patience()
