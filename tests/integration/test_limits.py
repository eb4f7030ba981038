"""Tests and jobs that hang: they fail by their name; see tests/processes/test_limits.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from jobs import ENVIRONMENT, ROOT, executed, finished

HANGING = """
import time
from mpi4py import MPI

def test_that_is_quick():
    MPI.COMM_WORLD.Barrier()

def test_that_hangs():
    if MPI.COMM_WORLD.rank == 0:
        MPI.COMM_WORLD.Barrier()
    else:
        time.sleep(600)
"""


def test_a_world_that_hangs_ends_and_each_rank_names_the_test(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{ROOT / 'tests'}:{ROOT}")
    (folder / "test_it.py").write_text(HANGING)
    options = ["--with-mpi", "-p", "limits", "-p", "no:cacheprovider", "-c", "/dev/null"]
    code, output = finished(
        *["run", "-n", "2", "-m", "pytest", *options, "--rootdir", ".", "-o", "limit_s=2"],
        "test_it.py",
    )
    assert code != 0, output
    for rank in range(2):
        name = "test_it.py::test_that_hangs"
        assert f"[rank {rank}] {name} has run longer than 2 s" in output
    assert re.search(r"line 10 in test_that_hangs", output), "nothing says where rank 0 waits"


@pytest.mark.any_mpi
def test_a_job_that_hangs_fails_its_test_with_its_output(capsys: pytest.CaptureFixture) -> None:
    program = "import time; print('it is up', flush=True); time.sleep(600)"
    with pytest.raises(pytest.fail.Exception, match=r"ran longer than 1 s, and was killed"):
        executed([sys.executable, "-c", program], timeout_s=1)
    assert capsys.readouterr().out == "it is up\n\n"
