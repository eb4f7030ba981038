"""What `parallel-sgd run` does for each rank, the doctor, and srun where there is a Slurm."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
from jobs import ENVIRONMENT, PARALLEL_SGD, SECONDS, TRAIN, executed

from parallel_sgd.launcher import bound_mpi

SCRIPT = """
import os, signal, sys
from parallel_sgd import Communicator
comm = Communicator.world()
assert comm.size == 3, comm.size
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
print("rank", comm.rank, "sees", os.environ["CUDA_VISIBLE_DEVICES"])
print("a warning of rank", comm.rank, file=sys.stderr)
comm.barrier()
if comm.rank == 2:
    os.write(1, b"the last words")
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


def test_gpus_network_and_log_of_each_rank(folder: Path) -> None:
    """And what a rank has written is there though it is killed."""
    (folder / "script.py").write_text(SCRIPT)
    options = ["--gpus-per-rank", "1", "--interface", "lo", "--log-dir", "logs"]
    code, output = executed(
        [*PARALLEL_SGD, "run", "-n", "3", *options, "script.py"],
        environ=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "4,5,6"},
        timeout_s=SECONDS,
    )
    assert code in (signal.SIGKILL, 128 + signal.SIGKILL), output
    for rank in range(3):
        words = "the last words" if rank == 2 else ""
        log = (folder / "logs" / f"rank-{rank}.out").read_text()
        assert log == f"rank {rank} sees {4 + rank}\n{words}"
        assert f"a warning of rank {rank}\n" in (folder / "logs" / f"rank-{rank}.err").read_text()
        assert output.count(f"a warning of rank {rank}\n") == 1
    assert "rank 0 sees 4\n" in output and "rank 1 sees" not in output


@pytest.mark.any_mpi
def test_the_doctor() -> None:
    code, output = executed(
        [*PARALLEL_SGD, "doctor", "-n", "3", "--json"], environ=ENVIRONMENT, timeout_s=2 * SECONDS
    )
    found = json.loads(output[output.index("\n{") :])
    assert code == int(any(one["level"] == "problem" for one in found["findings"])), output
    assert len(found["ranks"]) == 3 and found["ranks"][0]["axpy"] > 0
    assert {one["check"] for one in found["findings"]} >= {"mpi", "versions", "cores", "links"}


PLAN = "--nodes 1 --ranks-per-node 2 --bandwidth 1gbit --latency 100us --parameters 9610"


@pytest.mark.any_mpi
def test_from_a_plan_to_a_job(folder: Path) -> None:
    """The plan's file of options, and the doctor's script, which needs no variable of this test."""
    words = [*PLAN.split(), "--step-time", "5ms", "--config", "config.toml"]
    code, output = executed([*PARALLEL_SGD, "plan", *words], timeout_s=SECONDS)
    assert code == 0, output
    program = [TRAIN, "config.toml", "--epochs", "1", "--no-plot", "--output", "run"]
    doctor = [*PARALLEL_SGD, "doctor", "-n", "2", "--job", "job.sh", *program]
    code, output = executed(doctor, timeout_s=2 * SECONDS)
    assert code == 0, output
    assert output.splitlines()[-1] == "job.sh starts 2 ranks on 1 host: ./job.sh"
    (folder / "elsewhere").mkdir()
    environ = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    code, output = executed(
        [str(folder / "job.sh")],
        folder=folder / "elsewhere",
        environ=environ,
        timeout_s=2 * SECONDS,
    )
    assert code == 0, output
    assert "\n2 ranks, " in output and "\nepoch    1/1 " in output, output
    planned = tomllib.loads((folder / "config.toml").read_text())
    options = tomllib.loads((folder / "run" / "config.toml").read_text())
    assert planned and planned.items() <= options.items()
    assert (folder / "run" / "model.npz").is_file()


@pytest.fixture
def slurm() -> None:
    """Skips a test where there is none, or no node of it is idle."""
    if shutil.which("srun") is None:
        pytest.skip("there is no Slurm (srun)")
    try:
        asked = subprocess.run(["sinfo", "-h"], capture_output=True, timeout=10, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("Slurm does not answer")
    if b"idle" not in asked.stdout:
        pytest.skip("no node of Slurm is idle")


EARLY = """
import sys
from parallel_sgd import Communicator, UserError
from parallel_sgd.communication import launched_local_rank
if len(sys.argv) > 1 and launched_local_rank() == 1:
    raise UserError("this one cannot go on")
comm = Communicator.world()
print("rank", comm.rank, "of", comm.size, "is", launched_local_rank(), flush=True)
comm.barrier()
"""


@pytest.mark.usefixtures("slurm")
def test_srun_starts_ranks_and_ends_them(folder: Path) -> None:
    """Also where one fails before MPI is up, for which srun alone would wait for ever."""
    (folder / "early.py").write_text(EARLY)
    pmi = "pmix" if bound_mpi()["vendor"] == "Open MPI" else "pmi2"
    srun = ["srun", "-n", "2", f"--mpi={pmi}", *PARALLEL_SGD, "run", "early.py"]
    code, output = executed(srun, timeout_s=SECONDS)
    assert code == 0, output
    assert all(f"rank {rank} of 2 is {rank}" in output for rank in range(2))
    code, output = executed([*srun, "fail"], timeout_s=SECONDS)
    assert code != 0
    assert "[rank 1] parallel-sgd: error: this one cannot go on" in output
