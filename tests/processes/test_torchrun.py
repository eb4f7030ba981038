"""Ranks of torchrun where there is an MPI: they need none, and start none. More: tests/torch/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from limits import patience

from parallel_sgd.communication import without_launcher

PROGRAM = """
import atexit, sys
import parallel_sgd as psgd

with psgd.Communicator.world() as comm:
    comm.barrier()
atexit.register(lambda: print(comm.rank, comm.size, "mpi4py.MPI" in sys.modules))
"""


def test_ranks_of_torchrun_start_no_mpi(tmp_path: Path) -> None:
    """Nor at the end of the program, where a rank of MPI joins others that wait in MPI_Init."""
    (tmp_path / "program.py").write_text(PROGRAM)
    run = ["run", "--with", "torchrun", "-n", "2", "program.py"]
    done = subprocess.run(
        [sys.executable, "-m", "parallel_sgd", *run],
        cwd=tmp_path,
        env=without_launcher(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 False", "1 2 False"]
