"""`parallel-sgd run --with torchrun`: the command, and what is refused. Jobs: tests/torch/."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from parallel_sgd.command_line.main import main
from parallel_sgd.communication import (
    launched_local_rank,
    launched_rank,
    launched_size,
    without_launcher,
)
from parallel_sgd.communication.job_environment import launcher_name
from parallel_sgd.launcher.options import parse
from parallel_sgd.launcher.run import plan_torchrun


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in set(os.environ) - set(without_launcher(os.environ)):
        monkeypatch.delenv(name)
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_command_and_environment(script: str) -> None:
    options = "--with torchrun -n 3 --wait-timeout-s 30 --restarts 2 --servers 0"
    request = parse([*options.split(), script, "--lr", "1"])
    launch = plan_torchrun(request, {"MKL_NUM_THREADS": "7"}, cores=8)
    python, safe, torchrun, *words = launch.command
    assert (python, safe, Path(torchrun).name) == (sys.executable, "-P", "quiet_torchrun.py")
    assert Path(torchrun).exists()
    assert words == [
        *("--standalone", "--nproc-per-node", "3", "-m", "parallel_sgd.launcher.rank"),
        *(script, "--lr", "1"),
    ]
    assert launch.environ["PARALLEL_SGD_TORCHRUN_RANKS"] == "3"
    assert launch.environ["OMP_NUM_THREADS"] == "2" and "MKL_NUM_THREADS" not in launch.environ
    assert launch.environ["PARALLEL_SGD_WAIT_TIMEOUT_S"] == "30.0"
    assert launch.environ["PARALLEL_SGD_RESTART"] == "0"
    assert launch.environ["PARALLEL_SGD_SERVERS"] == "0"


def test_cores_of_a_batch_job_are_shared(script: str) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "6"}
    request = parse(["--with", "torchrun", "-n", "2", script])
    assert plan_torchrun(request, slurm, cores=64).environ["OMP_NUM_THREADS"] == "3"


RANK = {
    **{"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"},
    **{"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost"},
}


def test_its_ranks_know_their_number() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    ours = {**RANK, **slurm, "PARALLEL_SGD_TORCHRUN_RANKS": "3"}
    assert launcher_name(ours) == "parallel-sgd run"
    found = launched_size(ours), launched_rank(ours), launched_local_rank(ours)
    assert found == (3, 2, 1)
    assert launched_size(RANK) is None
    assert "PARALLEL_SGD_TORCHRUN_RANKS" not in without_launcher(ours)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--survive", "--survive"),
        ("--survive --spares 1", "--survive"),
        ("--mpiexec /bin/true", "--mpiexec"),
        ("--mpiexec-options=-x", "--mpiexec-options"),
    ],
)
def test_options_that_need_mpi(
    options: str, named: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--with", "torchrun", "-n", "3", *options.split(), script]) == 2
    assert capsys.readouterr().err == (
        f"parallel-sgd: error: {named} needs ranks of MPI, and --with torchrun starts others: "
        "leave one of the two options away\n"
    )


def test_a_signal_that_torchrun_takes_for_its_end(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--with", "torchrun", "-n", "2", "--preempt-on", "SIGUSR2,SIGTERM"]
    assert main(["run", *options, script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--preempt-on SIGUSR2,SIGTERM: torchrun ends its ranks at SIGTERM" in line


@pytest.mark.parametrize(
    ("lines", "ranks", "command"),
    [
        ("n0 slots=2\nn1 slots=2\n", 4, "--nnodes 2 --nproc-per-node 2"),
        ("n0 slots=2\nn1 slots=1\n", 3, "--nnodes 2 --nproc-per-node RANKS"),
    ],
)
def test_several_hosts_are_started_by_hand(
    lines: str, ranks: int, command: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = Path(script).with_name("hosts")
    hosts.write_text(lines)
    options = ["--with", "torchrun", "-n", str(ranks), "--hostfile", str(hosts)]
    assert main(["run", *options, script, "--lr", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"on each host run python -m torch.distributed.run {command} --rdzv-backend c10d "
        f"--rdzv-endpoint n0:29400 {script} --lr 1"
    )


def test_a_batch_job_on_several_hosts_is_started_by_hand(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"JOB_ID": 7, "JOB_NUM_NODES": 2, "NTASKS": 4}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert main(["run", "--with", "torchrun", script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST" in line


def test_without_pytorch(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel_sgd.launcher.torchrun.find_spec", lambda name: None)
    assert main(["run", "--with", "torchrun", "-n", "2", script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "parallel-sgd: error: --with torchrun needs PyTorch: pip install '.[torch]' from the "
        "checkout"
    )


def test_a_rank_starts_no_ranks(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**RANK, "PARALLEL_SGD_TORCHRUN_RANKS": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["run", "--with", "torchrun", script])
    assert "--with needs -n and ranks to be started" in capsys.readouterr().err
