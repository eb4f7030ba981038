"""Jobs of `parallel-sgd run --with torchrun`, where there is no MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits import patience

import parallel_sgd as psgd
from parallel_sgd.communication import without_launcher

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys, time
import parallel_sgd as psgd
from parallel_sgd import communication as c

rank, how = c.launched_rank(), sys.argv[1]
own = rank, c.launched_size(), c.launched_local_rank(), c.default_timeout(), sys.stdin.read()
print(*map(repr, own), flush=True)
if how == "waits":
    until = time.monotonic() + 60
    while not c.preemption_requested():
        assert time.monotonic() < until
        time.sleep(0.05)
    raise psgd.Preempted
if how == "raises":
    open(f"started-{rank}", "w").close()
    until = time.monotonic() + 60
    while not os.path.exists(f"started-{1 - rank}") and time.monotonic() < until:
        time.sleep(0.01)  # so that both raise at about the same time, on a busy machine, too
    raise psgd.UserError("x must be above 0")
with psgd.Communicator.world() as comm:
    assert (comm.rank, comm.size) == (rank, 2)
    if how == "killed once" and rank == 1 and os.environ["PARALLEL_SGD_RESTART"] == "0":
        os.kill(os.getpid(), 9)
    if how == "trains":
        from training import trained
        print(trained(comm).hex())
    comm.barrier()
"""

TRAINING = """
import numpy as np
import parallel_sgd as psgd

def trained(comm):
    generator = np.random.default_rng(comm.rank)
    parameters = psgd.Parameters({"w": np.zeros(20, np.float32)})
    algorithm = psgd.DataParallelSGD(gradient_bits=4)
    learner = psgd.Learner(parameters, psgd.SGD(lr=0.1), algorithm, comm)
    for _ in range(3):
        learner.gradient["w"][:] = generator.standard_normal(20)
        learner.step(samples=2)
    learner.finish()
    return parameters["w"].tobytes()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the program on two ranks: how its ranks go on, and more options of `run`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "training.py").write_text(TRAINING)

    def start(how: str, *options: str) -> subprocess.Popen[str]:
        run = [sys.executable, "-m", "parallel_sgd", "run", "--with", "torchrun", "-n", "2"]
        return subprocess.Popen(
            [*run, *options, "program.py", how],
            cwd=tmp_path,
            env=without_launcher(os.environ) | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def ended(job: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    """The exit code, the output, and the errors after the line that shows the command."""
    out, err = job.communicate(timeout=100 * patience())
    command, *errors = err.splitlines()
    assert "quiet_torchrun.py --standalone --nproc-per-node 2" in command, err
    return job.returncode, sorted(out.splitlines()), errors


def told(timeout_s: float) -> list[str]:
    return [f"{rank} 2 {rank} {timeout_s} ''" for rank in range(2)]


def test_ranks_train_as_threads_do_and_have_logs(start: Start, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(TRAINING, names)
    first, second = psgd.simulate(2, names["trained"])
    assert first == second != bytes(80)
    job = start("trains", "--wait-timeout-s", "20", "--log-dir", "logs")
    lines = [[line, first.hex()] for line in told(20.0)]
    assert ended(job) == (0, sorted(lines[0]), [])
    logs = [(tmp_path / "logs" / f"rank-{rank}.out").read_text() for rank in range(2)]
    assert [log.splitlines() for log in logs] == lines


def test_an_error_of_both_ranks_is_one_line(start: Start) -> None:
    line = "[ranks 0, 1] parallel-sgd: error: x must be above 0 (program.py:20)"
    assert ended(start("raises")) == (1, told(600.0), [line])


def test_a_killed_rank_is_named_and_the_job_starts_again(start: Start) -> None:
    code, out, errors = ended(start("killed once", "--restarts", "1"))
    assert (code, out) == (0, sorted(2 * told(600.0)))
    killed, restart, command = errors  # by rank 0, or by the launcher if torchrun has ended rank 0
    assert killed.startswith(("[rank 0] parallel-sgd: error: ", "parallel-sgd: error: "))
    assert "error: rank 1 (pid " in killed and "xit code" not in killed
    assert "ended without a report: restart 1 of 1 in 1 s" in restart
    assert "PARALLEL_SGD_RESTART=1" in command


def test_ranks_leave_when_asked(start: Start) -> None:
    job = start("waits", "--preempt-on", "SIGUSR1")
    assert job.stdout is not None
    lines = sorted(job.stdout.readline() for _ in range(2))
    assert lines == [f"{line}\n" for line in told(600.0)]
    job.send_signal(signal.SIGUSR1)
    assert ended(job) == (75, [], ["parallel-sgd: SIGUSR1: the ranks are asked to leave"])


def test_a_signal_ends_the_job(start: Start) -> None:
    job = start("waits", "--preempt-on", "SIGUSR1")
    assert job.stdout is not None
    assert len([job.stdout.readline() for _ in range(2)]) == 2
    began = time.monotonic()
    job.send_signal(signal.SIGTERM)
    code, _, errors = ended(job)
    assert (code, errors) == (128 + signal.SIGTERM, ["parallel-sgd: SIGTERM: the job was ended"])
    assert time.monotonic() - began < 20 * patience()


def test_torchrun_itself_is_offered_where_mpi_is_missing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "parallel_sgd", "run", "-n", "2", "program.py", "--lr", "1"],
        cwd=tmp_path,
        env=without_launcher(os.environ) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("parallel-sgd: error: MPI is not installed: pip install '.[mpich]'")
    assert line.endswith("needs no MPI: parallel-sgd run --with torchrun -n 2 program.py --lr 1")


def test_the_doctor_writes_a_job_script(tmp_path: Path) -> None:
    """Its ranks find each other without MPI, and so do those of the script."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "training.py").write_text(TRAINING)
    environ = without_launcher(os.environ) | {"PYTHONPATH": str(ROOT)}
    words = ["doctor", "--with", "torchrun", "--job", "job.sh", "--", "program.py", "trains"]
    doctor = subprocess.run(
        [sys.executable, "-m", "parallel_sgd", *words],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100 * patience(),
    )
    assert doctor.returncode == 0, doctor
    assert doctor.stdout.startswith("ok       torchrun: PyTorch ")
    assert doctor.stdout.endswith("job.sh starts 2 ranks on 1 host: ./job.sh\n")
    del environ["PYTHONPATH"]  # the script has it
    script = [str(tmp_path / "job.sh")]
    pipe = subprocess.PIPE
    job = subprocess.Popen(script, env=environ, stdout=pipe, stderr=pipe, text=True)
    names: dict[str, Any] = {}
    exec(TRAINING, names)
    trained = psgd.simulate(2, names["trained"])[0].hex()
    assert ended(job) == (0, sorted([*told(600.0), trained, trained]), [])
