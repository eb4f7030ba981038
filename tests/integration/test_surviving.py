"""Ranks that survive each other over MPI, where it takes many rounds to see that they do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import ENVIRONMENT, PARALLEL_SGD, TRAIN, executed, finished

REVOKED_AT_ONCE = """
import parallel_sgd as psgd

comm = psgd.Communicator.world(timeout_s=30)
for number in range(300):
    try:
        made = comm.duplicate() if number % 2 else comm.split(0)
        if comm.rank:
            made.barrier()
            comm.barrier()
    except psgd.RanksLost:
        pass
    comm.revoke()
    comm.reconfigure(allow_join=False)
print(f"{comm.size} ranks regroup", flush=True)
"""


@pytest.mark.open_mpi
def test_a_communicator_is_revoked_as_soon_as_it_is_made(folder: Path) -> None:
    """By one rank, while others may yet be in the call that makes it: they do not crash."""
    (folder / "revoked.py").write_text(REVOKED_AT_ONCE)
    code, output = finished("run", "-n", "3", "--survive", "revoked.py")
    assert code == 0, output
    assert output.count("3 ranks regroup") == 3


LEAVES = """
import parallel_sgd as psgd

comm = psgd.Communicator.world()
model = psgd.models.MLP([4, 3], seed=1)
algorithm = psgd.DataParallelASGD(sync_steps=1, servers=1)
learner = psgd.Learner(model.parameters, psgd.SGD(lr=0.1), algorithm, comm)
if not learner.serves:
    learner.step(samples=1)
if comm.rank != 1:
    learner.finish()
"""


@pytest.mark.open_mpi
def test_a_worker_that_leaves_its_servers_ends_the_job(folder: Path) -> None:
    """It has not died, so nobody goes on without it; and nobody waits for it for ever."""
    (folder / "leaves.py").write_text(LEAVES)
    options = ["-n", "3", "--survive", "--wait-timeout-s", "2"]
    code, output = finished("run", *options, "leaves.py")
    assert code not in (0, 124), output
    assert "has received nothing from the worker on rank 1 for timeout_s=2 s" in output


#: Imported by every Python as it starts: of the ranks with a launcher's folder one kills itself,
#: the first time before it could sign on, and the second time between MPI_Init and its learner.
DIES_TWICE = """
import os, signal, sys

def dies(mark):
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("OMPI_COMM_WORLD_RANK") == "1" and not dies("first"):
    def look(event, arguments):
        if event == "open" and str(arguments[0]).endswith("digits.csv.gz"):
            dies("second")
    sys.addaudithook(look)
"""


@pytest.mark.open_mpi
def test_a_job_of_which_a_rank_dies_before_training_is_started_anew(folder: Path) -> None:
    """The others would wait for it in MPI_Init; and the same model comes of it."""
    options = ["--epochs", "2", "--no-plot", "--hidden", "16", "--output"]
    code, output = finished("simulate", "-n", "3", *options, "whole")
    assert code == 0, output
    (folder / "sitecustomize.py").write_text(DIES_TWICE)
    environ = ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join([str(folder), ENVIRONMENT["PYTHONPATH"]])
    }
    code, output = executed(
        [*PARALLEL_SGD, "run", "-n", "3", "--survive", TRAIN, *options, "again"], environ=environ
    )
    assert code == 0, output
    assert Path("first").exists() and Path("second").exists()
    gone = "ended without a report before the ranks had made a learner: nothing was trained yet"
    assert output.count(gone) == 2 and f"rank 1 {gone}" in output
    whole, again = (Path(run, "model.npz").read_bytes() for run in ("whole", "again"))
    assert whole == again
