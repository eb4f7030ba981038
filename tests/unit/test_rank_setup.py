"""What a rank sets up before its script, and what of it `parallel-sgd run` says to mpiexec: GPUs,
the network, logs, a batch system's hosts."""

from __future__ import annotations

import os
import re
import sys
from ipaddress import IPv4Interface
from pathlib import Path

import pytest

from parallel_sgd.communication import (
    GPUS_PER_RANK,
    INTERFACE,
    LOG_DIR,
    WAIT_TIMEOUT_S,
    without_launcher,
)
from parallel_sgd.communication.network_interfaces import Interface, interfaces
from parallel_sgd.errors import UserError
from parallel_sgd.launcher import (
    Allocation,
    Mpiexec,
    Request,
    allocation,
    parse,
    plan,
    rank,
)
from parallel_sgd.launcher import run as launcher
from parallel_sgd.launcher.host_resources import (
    VISIBLE,
    checked_interface,
    gpu_count,
    interface_variables,
    local_interface,
    visible_gpus,
)

SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "2"}


@pytest.mark.parametrize(
    ("per_rank", "local_rank", "environ", "visible"),
    [
        (1, 2, {VISIBLE: "4,5,6"}, "6"),
        (2, 1, {VISIBLE: "GPU-a, GPU-b,GPU-c,GPU-d"}, "GPU-c,GPU-d"),
        (1, 3, SRUN | {VISIBLE: "0,1,2,3"}, "3"),
        # srun has given each task its own; mpiexec in the same job has not
        (1, 3, SRUN | {VISIBLE: "2", "SLURM_GPUS_PER_TASK": "1"}, "2"),
        (1, 1, {VISIBLE: "0,1", "SLURM_GPUS_PER_TASK": "1", "SLURM_JOB_ID": "7"}, "1"),
    ],
)
def test_each_rank_sees_its_own_gpus(
    per_rank: int, local_rank: int, environ: dict[str, str], visible: str
) -> None:
    assert visible_gpus(per_rank, local_rank, environ) == visible


@pytest.mark.parametrize(
    ("listed", "count"),
    [("0,1,2", 3), ("", 0), ("0", 1), ("NoDevFiles", 0), ("0,1,-1,3", 2)],
)
def test_a_host_with_too_few_gpus(listed: str, count: int) -> None:
    wrong = rf"^gpus_per_rank=2 takes 4 GPUs .* rank 1, and {VISIBLE}='{listed}' leaves it {count}$"
    with pytest.raises(UserError, match=wrong):
        visible_gpus(2, 1, {VISIBLE: listed})


def test_gpus_are_counted_by_their_devices(tmp_path: Path) -> None:
    assert gpu_count(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpu_count(tmp_path) == 2
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "dxg").touch()
    assert gpu_count(tmp_path / "elsewhere") is None
    assert visible_gpus(2, 1, {}, tmp_path / "elsewhere") == "2,3"  # unknown: CUDA will say it
    (tmp_path / "nvidia2").touch()
    with pytest.raises(UserError, match=r"takes 4 GPUs .* and it has 3$"):
        visible_gpus(2, 1, {}, tmp_path)
    (tmp_path / "nvidia3").touch()
    assert visible_gpus(2, 1, {}, tmp_path) == "2,3"


THERE = [
    Interface("lo", IPv4Interface("127.0.0.1/8"), loopback=True),
    Interface("eth0", IPv4Interface("10.0.0.5/24")),
    Interface("ib0", IPv4Interface("10.1.0.5/16")),
]


@pytest.mark.parametrize(
    ("text", "name"), [("eth0", "eth0"), ("10.1.0.0/16", "ib0"), ("10.1.2.3/16", "ib0")]
)
def test_an_interface_by_name_or_network(text: str, name: str) -> None:
    chosen = local_interface(checked_interface(text), THERE)
    assert chosen.name == name
    told = interface_variables(chosen)
    assert told["GLOO_SOCKET_IFNAME"] == told["OMPI_MCA_btl_tcp_if_include"] == name
    assert told["NCCL_SOCKET_IFNAME"] == f"={name}"


@pytest.mark.parametrize("text", ["", "eth0,eth1", "10.0.0.0/33", "a b", "eth0/", "fd00::/64"])
def test_what_names_no_interface(text: str) -> None:
    wrong = f"^interface={re.escape(repr(text))} must be one interface's name"
    with pytest.raises(UserError, match=wrong):
        checked_interface(text)


@pytest.mark.parametrize(("text", "names"), [("eth7", 0), ("10.0.0.0/8", 2), ("10.9.0.0/16", 0)])
def test_an_interface_that_this_host_lacks(text: str, names: int) -> None:
    wrong = f"^interface='{text}' must name one .* names {names}: .*eth0 10.0.0.5/24, ib0"
    with pytest.raises(UserError, match=wrong):
        local_interface(checked_interface(text), THERE)


def test_the_interfaces_of_this_host() -> None:
    found = {one.name: one for one in interfaces()}
    assert found["lo"].loopback and str(found["lo"].address) == "127.0.0.1/8"


def test_mpiexecs_own_connections_take_the_interface() -> None:
    for mpi, version, interface, words in (
        ("Open MPI", "5.0.11", "10.1.0.0/16", "--prtemca prte_if_include 10.1.0.0/16"),
        ("Open MPI", "4.1.4", "ib0", "--mca oob_tcp_if_include ib0"),
        ("MPICH", "5.0.2", "127.0.0.0/8", "-iface lo"),
    ):
        asked = Request(2, ("a.py",), interface=interface)
        launch = plan(asked, Mpiexec("/m", mpi, version), {}, cores=2, root=False)
        assert f" {words} {sys.executable} " in launch.line()
        assert launch.environ[INTERFACE] == interface
    asked = Request(2, ("a.py",), interface="lo")  # Open MPI's daemons refuse it
    assert (
        "if_include"
        not in plan(asked, Mpiexec("/m", "Open MPI", "5.0"), {}, cores=2, root=False).line()
    )


def test_options_for_ranks_reach_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    asked = parse(
        [
            "-n",
            "3",
            "--gpus-per-rank",
            "2",
            "--interface",
            "10.0.0.5/24",
            "--log-dir",
            "logs",
            "--wait-timeout-s",
            "7.5",
            "a.py",
        ]
    )
    told = {GPUS_PER_RANK: "2", INTERFACE: "10.0.0.0/24", LOG_DIR: str(tmp_path / "logs")}
    told |= {WAIT_TIMEOUT_S: "7.5"}
    assert asked.for_ranks == told
    assert without_launcher(told | {"PATH": "/bin"}) == {"PATH": "/bin"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    launch = plan(asked, Mpiexec("/m", "Open MPI", "5.0.11"), slurm, cores=2, root=False)
    assert all(f"-x {name} " in launch.line() for name in told)


PBS = {"PBS_JOBID": "1.server", "PBS_NODEFILE": "nodes"}


@pytest.mark.parametrize(
    ("environ", "given"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, Allocation("Slurm")),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8",
             "SLURM_CPUS_ON_NODE": "4"},
            Allocation("Slurm", 2, 8, 4),
        ),
        (PBS, Allocation("PBS", 2, 3)),
        (PBS | {"PBS_NODEFILE": "gone", "PBS_NUM_NODES": "2"}, Allocation("PBS", 2)),
        ({"PE_HOSTFILE": "x", "NHOSTS": "2", "NSLOTS": "6"}, Allocation("Grid Engine", 2, 6)),
        ({"LSB_JOBID": "5", "LSB_DJOB_NUMPROC": "6"}, Allocation("LSF", None, 6)),
    ],
)  # fmt: skip
def test_what_a_batch_system_has_given(
    environ: dict[str, str], given: Allocation | None, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    assert allocation(environ) == given


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher, no batch system, and a script."""
    others = {"PBS_NODEFILE", "OMP_NUM_THREADS"}
    for name in set(os.environ) - set(without_launcher(os.environ)) | others:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    return monkeypatch


def test_a_batch_job_says_how_many_ranks(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="-n must be given"):
        parse(["a.py"])
    bare.setenv("PBS_NODEFILE", "nodes")
    assert parse(["a.py"]).ranks == 3
    assert parse(["-n", "2", "a.py"]).ranks == 2
    shared = plan(parse(["a.py"]), Mpiexec("/m", "MPICH", "5"), os.environ, cores=8, root=False)
    assert shared.environ["NUMBA_NUM_THREADS"] == "4"  # two on the fullest of two hosts


def test_the_jobs_share_of_a_host_is_shared_among_its_ranks() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "4"}
    asked = Request(2, ("a.py",))
    launch = plan(asked, Mpiexec("/m", "MPICH", "5"), slurm, cores=64, root=False)
    assert launch.environ["OMP_NUM_THREADS"] == "2"


def test_run_under_srun_is_one_of_its_ranks(
    bare: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        **SRUN,
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "1",
        VISIBLE: "4,5,6",
    }.items():
        bare.setenv(name, value)
    for name in (GPUS_PER_RANK, INTERFACE, *interface_variables(THERE[0])):
        bare.setenv(name, "")  # so that it is taken back afterwards
        bare.delenv(name)
    (tmp_path / "a.py").write_text(
        f"import os, sys; print(os.environ['{VISIBLE}'], os.environ['GLOO_SOCKET_IFNAME'], "
        "sys.argv[1:])"
    )
    argv = ["--gpus-per-rank", "1", "--interface", "lo", "a.py", "-n", "3"]
    bare.setattr(sys, "argv", ["parallel-sgd"])
    bare.setattr(rank, "report_start", lambda: None)
    assert launcher.main(argv) == 0
    assert capsys.readouterr().out.split("\n")[0] == "5 lo ['-n', '3']"
    with pytest.raises(UserError, match=r"^--timeout-s needs -n .* 1 ranks that srun has started"):
        parse(["--timeout-s", "3", "a.py"])


@pytest.mark.parametrize("value", ["", "0", "one", "-1"])
def test_a_number_of_gpus_that_is_none(value: str, bare: pytest.MonkeyPatch) -> None:
    bare.setenv(GPUS_PER_RANK, value)
    bare.setattr(rank, "report_start", lambda: None)
    with pytest.raises(UserError, match=f"^{GPUS_PER_RANK}='{value}' must be a whole number"):
        rank.prepare()


def test_a_log_folder_that_cannot_be_one(bare: pytest.MonkeyPatch) -> None:
    bare.setenv(LOG_DIR, "a.py")
    with pytest.raises(UserError, match=r"^log_dir='a.py' must be a folder"):
        rank.prepare()
