"""Ranks that survive each other over MPI, where it takes many rounds to see that they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import finished

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
    comm.regroup(grows=False)
print(f"{comm.size} ranks regroup", flush=True)
"""


@pytest.mark.open_mpi
def test_a_communicator_is_revoked_as_soon_as_it_is_made(folder: Path) -> None:
    """By one rank, while others may yet be in the call that makes it: they do not crash."""
    (folder / "revoked.py").write_text(REVOKED_AT_ONCE)
    code, output = finished("run", "-n", "3", "--survive", "revoked.py")
    assert code == 0, output
    assert output.count("3 ranks regroup") == 3
