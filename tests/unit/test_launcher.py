"""`parallel-sgd run`: the command and environment it makes of a request, and what it refuses."""

import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from parallel_sgd.__main__ import main
from parallel_sgd.command_line import info
from parallel_sgd.communication import (
    RANK_PROCESS,
    SERVERS,
    SURVIVE,
    requested_servers,
    without_launcher,
)
from parallel_sgd.communication.liveness import rank_process
from parallel_sgd.errors import UserError
from parallel_sgd.launcher import (
    THREAD_VARIABLES,
    Launch,
    Mpiexec,
    Request,
    choose_mpiexec,
    identify,
    parse,
    plan,
    read_hostfile,
)
from parallel_sgd.launcher import mpiexec as mpi_runtime
from parallel_sgd.launcher import run as launcher

OPEN_MPI = Mpiexec("/o/mpiexec", "Open MPI", "5.0.11")
MPICH = Mpiexec("/m/mpiexec", "MPICH", "5.0.2")
RANK = [sys.executable, "-m", "parallel_sgd.launcher.rank"]


def planned(
    mpiexec: Mpiexec,
    *,
    ranks: int = 4,
    environ: Mapping[str, str] | None = None,
    cores: int = 2,
    root: bool = False,
    **request: Any,
) -> Launch:
    asked = Request(ranks, ("train.py", "--lr", "0.1"), **request)
    return plan(asked, mpiexec, environ or {}, cores=cores, root=root)


def options(launch: Launch) -> list[str]:
    """What stands between mpiexec and python."""
    command = list(launch.command)
    assert command[-6:] == [*RANK, "train.py", "--lr", "0.1"]
    return command[1:-6]


def test_mpich_needs_no_options() -> None:
    launch = planned(MPICH, root=True)
    assert launch.command[0] == "/m/mpiexec"
    assert options(launch) == ["-n", "4"]


def test_open_mpi_gets_the_options_that_take_its_traps_away() -> None:
    oversubscribe = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    spinning = ["--mca", "mpi_yield_when_idle", "1"]
    assert options(planned(OPEN_MPI, cores=4)) == ["-n", "4", *oversubscribe]
    assert options(planned(OPEN_MPI, cores=2)) == ["-n", "4", *oversubscribe, *spinning]
    root = options(planned(OPEN_MPI, cores=4, root=True))
    assert root == ["-n", "4", "--allow-run-as-root", *oversubscribe]


def test_the_users_own_mpiexec_options_win() -> None:
    own = ("--map-by", "numa", "--bind-to", "core", "--mca", "mpi_yield_when_idle", "0")
    assert options(planned(OPEN_MPI, mpiexec_options=own)) == ["-n", "4", *own]


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 4, 2), (2, 4, 1), (7, 2, 3)])
def test_cores_are_shared_among_the_ranks(cores: int, ranks: int, threads: int) -> None:
    environ = planned(MPICH, cores=cores, ranks=ranks).environ
    assert {environ[name] for name in THREAD_VARIABLES} == {str(threads)}
    assert environ["PARALLEL_SGD_RANKS"] == str(ranks)


def test_thread_variables_that_the_user_has_set_stay() -> None:
    added = planned(MPICH, cores=8, environ={"NUMBA_NUM_THREADS": "3"}).environ
    assert "NUMBA_NUM_THREADS" not in added
    assert added["OMP_NUM_THREADS"] == "2"
    added = planned(MPICH, cores=8, environ={"OMP_NUM_THREADS": "5"}).environ
    assert "OMP_NUM_THREADS" not in added
    assert added["OPENBLAS_NUM_THREADS"] == added["NUMBA_NUM_THREADS"] == "5"


@pytest.fixture
def hostfile(tmp_path: Path) -> Any:
    path = tmp_path / "hosts"
    path.write_text("n0 slots=2\nn1 slots=2\n")
    return read_hostfile(path)


def test_a_hostfile_reaches_each_mpiexec_in_its_dialect(hostfile: Any, tmp_path: Path) -> None:
    mpich = planned(MPICH, hostfile=hostfile, cores=8)
    assert options(mpich) == ["-n", "4", "-hosts", "n0:2,n1:2"]
    assert mpich.environ["NUMBA_NUM_THREADS"] == "4"
    given = planned(OPEN_MPI, hostfile=hostfile, environ={"PYTHONPATH": "/p"})
    assert options(given)[:4] == ["-n", "4", "--hostfile", str(tmp_path / "hosts")]
    assert passed_on(given) == [
        *(*THREAD_VARIABLES, "PARALLEL_SGD_RANKS", "PARALLEL_SGD_FOLDER", "PYTHONPATH")
    ]


def passed_on(launch: Launch) -> list[str]:
    """Names of the variables that Open MPI is told to give to ranks on other hosts."""
    return [value for name, value in pairwise(options(launch)) if name == "-x"]


@pytest.mark.parametrize("servers", [0, 1, 3])
def test_the_ranks_are_told_how_many_of_them_serve(servers: int, hostfile: Any) -> None:
    launch = planned(MPICH, servers=servers)
    assert launch.environ[SERVERS] == str(servers)
    assert f"{SERVERS}={servers} " in launch.line()
    assert options(launch) == ["-n", "4"]
    assert requested_servers(launch.environ) == servers
    assert SERVERS not in passed_on(planned(OPEN_MPI, servers=servers))
    assert SERVERS in passed_on(planned(OPEN_MPI, servers=servers, hostfile=hostfile))
    batch = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    assert SERVERS in passed_on(planned(OPEN_MPI, servers=servers, environ=batch))


def test_servers_from_the_users_environment_reach_other_hosts_too(hostfile: Any) -> None:
    launch = planned(OPEN_MPI, environ={SERVERS: "1"}, hostfile=hostfile)
    assert SERVERS not in launch.environ
    assert passed_on(launch).count(SERVERS) == 1
    launch = planned(OPEN_MPI, environ={SERVERS: "1"}, servers=2, hostfile=hostfile)
    assert launch.environ[SERVERS] == "2"
    assert passed_on(launch).count(SERVERS) == 1


def test_servers_that_nobody_asked_for(hostfile: Any) -> None:
    launch = planned(OPEN_MPI, hostfile=hostfile)
    assert SERVERS not in launch.environ and SERVERS not in passed_on(launch)
    assert requested_servers({}) is None
    assert without_launcher({SERVERS: "1", SURVIVE: "1", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("text", ["", "-1", "1.0", "one", " 1"])
def test_a_number_of_servers_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVERS, text)
    with pytest.raises(UserError, match=f"{SERVERS}='{text}' must be a whole number, at least 0"):
        requested_servers()
    monkeypatch.setenv(SERVERS, "2")
    assert requested_servers() == 2


SURVIVING = ["--with-ft", "ulfm", "--mca", "coll", "^hcoll,portals4,han,cuda"]


def test_ranks_that_survive_another(hostfile: Any) -> None:
    launch = planned(OPEN_MPI, cores=4, survive=True)
    plain = options(planned(OPEN_MPI, cores=4))
    assert options(launch) == [*plain, *SURVIVING]
    assert launch.environ[SURVIVE] == "1"
    assert f"{SURVIVE}=1 " in launch.line()
    assert "'^hcoll,portals4,han,cuda'" in launch.line()
    assert SURVIVE in passed_on(planned(OPEN_MPI, survive=True, hostfile=hostfile))
    batch = planned(OPEN_MPI, survive=True, environ={"PBS_NODEFILE": "/var/nodes"})
    assert options(batch)[4:9] == SURVIVING
    assert SURVIVE not in planned(OPEN_MPI).environ


@pytest.mark.parametrize(
    ("own", "added"),
    [
        (("--with-ft", "mpi"), SURVIVING[2:]),
        (("--mca", "coll", "^han"), SURVIVING[:2]),
        (("--mca", "coll_hcoll_enable", "0"), SURVIVING),
    ],
)
def test_the_users_own_way_to_survive_wins(own: tuple[str, ...], added: list[str]) -> None:
    plain = options(planned(OPEN_MPI, cores=4))
    launch = planned(OPEN_MPI, cores=4, survive=True, mpiexec_options=own)
    assert options(launch) == [*plain, *added, *own]


@pytest.mark.parametrize(
    ("mpiexec", "shown"),
    [
        (MPICH, "/m/mpiexec is MPICH 5.0.2,"),
        (Mpiexec("/i/mpiexec", "Intel MPI", "2021.9"), "/i/mpiexec is Intel MPI 2021.9,"),
        (Mpiexec("/o/mpiexec", "Open MPI", "4.1.4"), "/o/mpiexec is Open MPI 4.1.4,"),
        (Mpiexec("/x/mpiexec", None, None), "/x/mpiexec is of an unknown vendor,"),
    ],
)
def test_survival_needs_open_mpi_5(mpiexec: Mpiexec, shown: str) -> None:
    with pytest.raises(UserError, match=f"^--survive needs Open MPI 5 or later: {shown}") as told:
        planned(mpiexec, survive=True)
    assert "--restarts N restarts the job" in str(told.value)
    assert "--with-ft" in options(planned(Mpiexec("/o/mpiexec", "Open MPI", None), survive=True))


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
        {"PBS_NODEFILE": "/var/nodes", "PBS_NUM_NODES": "2"},
        {"PE_HOSTFILE": "/var/hosts", "NHOSTS": "2"},
    ],
)
def test_steps_aside_in_a_batch_job(environ: dict[str, str]) -> None:
    launch = planned(OPEN_MPI, environ=environ, cores=8)
    assert launch.environ["NUMBA_NUM_THREADS"] == "4"
    assert [word for word in options(launch) if word.startswith("--")] == ["--bind-to"]
    assert options(planned(MPICH, environ=environ)) == ["-n", "4"]


def test_the_printed_line_can_be_pasted_into_a_shell() -> None:
    launch = Launch(("/o/mpiexec", "-n", "2", "python", "my script.py"), {"A": "x y"})
    assert launch.line() == "A='x y' /o/mpiexec -n 2 python 'my script.py'"
    assert shlex.split(launch.line())[1:] == list(launch.command)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in set(launcher.os.environ) - set(without_launcher(launcher.os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return "train.py"


def test_arguments_after_the_script_are_the_scripts(script: str) -> None:
    request = parse(["-np", "3", script, "-n", "7", "--timeout-s", "x", "--", "-m"])
    assert request.ranks == 3
    assert request.command == (script, "-n", "7", "--timeout-s", "x", "--", "-m")
    request = parse(["-n4", "--timeout-s=2.5", "-m", "package.module", "-n", "7"])
    assert (request.ranks, request.timeout_s) == (4, 2.5)
    assert request.command == ("-m", "package.module", "-n", "7")
    request = parse(["-n", "5", "--servers", "4", "--survive", script, "--servers", "9"])
    assert (request.servers, request.survive) == (4, True)
    assert request.command == (script, "--servers", "9")
    request = parse(["-n", "1", "--servers=0", script])
    assert (request.servers, request.survive) == (0, False)
    assert parse(["-n", "1", script]).servers is None
    request = parse(["-n", "1", "--mpiexec-options=--map-by 'a b'", script])
    assert request.mpiexec_options == ("--map-by", "a b")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("run train.py", "-n must be given"),
        ("run train.py -n 4 --lr 1", "-n 4 must come before .*: .* run -n 4 train.py --lr 1$"),
        ("run train.py --lr 1 -np=4", "-np=4 must come before the script.*-np=4 train.py --lr 1$"),
        ("run -m pytest -n4", "-n4 must come before .*: parallel-sgd run -n4 -m pytest$"),
        ("run -n 0 train.py", "-n.*from 1 to 1048576: '0'"),
        ("run -n 2147483648 train.py", "-n.*from 1 to 1048576: '2147483648'"),
        ("run -n four train.py", "-n.*whole number.*'four'"),
        ("run -n 2", "a script must be given"),
        ("run -n 2 -m", "-m must be followed by a module"),
        ("run -n 2 none.py", "script must exist: 'none.py'"),
        ("run -n 2 python3 train.py", "'python3'.*without the interpreter"),
        ("run -n 2 --hostfile none train.py", "hostfile 'none': there is no such file"),
        ("run -n 2 --timeout-s 0 train.py", "--timeout-s.*above 0: '0'"),
        ("run -n 2 --timeout-s nan train.py", "--timeout-s.*'nan'"),
        ("run -n 2 --mpiexec-options ' train.py", "--mpiexec-options.*quoted"),
        ("run -n 5 --servers 5 train.py", "servers=5 must be less than the number of ranks, 5: "),
        ("run -n 2 --servers 3 train.py", "servers=3 must be less .* ranks, 2: "),
        ("run -n 2 --servers -1 train.py", "--servers.*from 0 to 1048576: '-1'"),
        ("run -n 2 --servers 1.0 train.py", "--servers.*whole number.*'1.0'"),
        ("run -n 2 --colour train.py", "unrecognized arguments: --colour"),
        ("run -n 2 --mpiexec /no/mpiexec train.py", "'/no/mpiexec'"),
        ("fly", "invalid choice: 'fly'"),
        ("simulate", "the following arguments are required: -n"),
        ("--colour", "--colour|COMMAND"),
        ("info --colour", "unrecognized arguments: --colour"),
    ],
)
def test_one_line_and_exit_code_2(
    script: str, capsys: pytest.CaptureFixture[str], line: str, wrong: str
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("parallel-sgd: error: ")
    assert re.search(wrong, err), err


def test_refuses_to_start_ranks_from_a_rank(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert main(["run", "-n", "4", script, "--lr", "1"]) == 2
    line = capsys.readouterr().err
    assert "rank 1 of 4, started by srun" in line
    assert "leave -n away: parallel-sgd run train.py --lr 1" in line


def fake_mpiexec(folder: Path, says: str) -> str:
    folder.mkdir(parents=True)
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "vendor", "version"),
    [
        ("mpiexec (Open MPI) 5.0.11", "Open MPI", "5.0.11"),
        ("mpiexec.openmpi (OpenRTE) 4.1.4", "Open MPI", "4.1.4"),
        ("HYDRA build details:\n    Version:   5.0.2", "MPICH", "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 2023", "Intel MPI", "2021.9"),
        ("what?", None, None),
    ],
)
def test_whose_mpiexec(tmp_path: Path, says: str, vendor: str | None, version: str | None) -> None:
    path = fake_mpiexec(tmp_path / "bin", says)
    assert identify(path) == Mpiexec(path, vendor, version)


@pytest.fixture
def python_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], None]:
    """Sets the folder of Python's program, in an environment without scripts."""
    python = os.path.realpath(sys.executable)

    def give(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "python").symlink_to(python)
        for owner, name, value in (
            (sys, "executable", str(folder / "python")),
            (sysconfig, "get_path", lambda name: str(tmp_path / "none")),
        ):
            monkeypatch.setattr(owner, name, value)

    return give


def test_takes_the_first_mpiexec_of_the_right_vendor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_in: Callable[[Path], None]
) -> None:
    open_mpi = fake_mpiexec(tmp_path / "a", "mpiexec (Open MPI) 5.0.11")
    mpich = fake_mpiexec(tmp_path / "b", "HYDRA build details: Version: 5.0.2")
    python_in(tmp_path / "none")
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert choose_mpiexec("Open MPI").path == open_mpi
    assert choose_mpiexec("MPICH").path == choose_mpiexec("Intel MPI").path == mpich
    with pytest.raises(UserError, match=rf"must be of Open MPI.*{mpich} \(MPICH\)"):
        choose_mpiexec("Open MPI", mpich)
    os.remove(open_mpi)
    with pytest.raises(UserError, match=rf"must be of Open MPI.*{mpich} \(MPICH\)"):
        choose_mpiexec("Open MPI")
    os.remove(mpich)
    with pytest.raises(UserError, match=r"of MPICH.* must be beside .* or in PATH: there is none"):
        choose_mpiexec("MPICH")


def test_mpiexecs_are_sought_beside_python_and_then_along_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_in: Callable[[Path], None]
) -> None:
    beside = fake_mpiexec(tmp_path / "venv", "")
    elsewhere = fake_mpiexec(tmp_path / "usr", "")
    python_in(tmp_path / "venv")
    monkeypatch.setenv("PATH", f"{tmp_path / 'usr'}:{tmp_path / 'venv'}")
    assert mpi_runtime.find_mpiexecs() == [beside, elsewhere]


@pytest.fixture
def no_mpi4py(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mpi4py.py").write_text("import no_such_mpi4py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))


@pytest.mark.usefixtures("no_mpi4py")
def test_without_mpi4py(script: str, capsys: Any) -> None:
    assert main(["run", "-n", "2", script]) == 2
    line = capsys.readouterr().err
    assert "mpi4py must find an MPI library" in line
    assert "No module named 'no_such_mpi4py'" in line


@pytest.mark.parametrize(
    ("argv", "shows"),
    [
        ([], "start a Python script on N ranks"),
        (["--help"], "show MPI, mpiexec, cores and GPUs"),
        (["--version"], r"parallel-sgd \d"),
        (["run", "--help"], "--hostfile"),
        (["run", "--help"], "--servers N "),
        (["run", "--help"], "--survive "),
        (["info", "--help"], "--json"),
    ],
)
def test_help_and_version(capsys: pytest.CaptureFixture[str], argv: list[str], shows: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    assert re.search(shows, capsys.readouterr().out)


def cupy_with(**count: Any) -> Any:
    """As much of CuPy as `parallel-sgd info` asks."""
    gpu = {"name": b"H200", "totalGlobalMem": 2**37, "major": 9, "minor": 0}
    cupy = Mock(__version__="14.2.0")
    cupy.cuda.runtime.getDeviceCount.configure_mock(**count)
    cupy.cuda.runtime.getDeviceProperties.return_value = gpu
    return cupy


GPU = "H200, 128 GiB, sm_90"
ABSENT = RuntimeError("cudaErrorNoDevice: none")


@pytest.mark.usefixtures("no_mpi4py")
@pytest.mark.parametrize(
    ("cupy", "gpus"),
    [
        (None, {"found": "unknown (cupy is not installed)"}),
        (cupy_with(return_value=0), {"cupy": "14.2.0", "found": "none"}),
        (cupy_with(side_effect=ABSENT), {"cupy": "14.2.0", "found": f"none ({ABSENT})"}),
        (cupy_with(return_value=2), {"cupy": "14.2.0", "0": GPU, "1": GPU}),
    ],
)
def test_info_without_mpi_and_with_and_without_gpus(
    tmp_path: Path,
    python_in: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    cupy: Any,
    gpus: dict[str, str],
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    python_in(tmp_path / "bin")
    monkeypatch.setenv("PATH", "")
    sections = info.collect()
    assert sections["gpus"] == gpus
    assert "no_such_mpi4py" in sections["mpi"]["error"]
    assert sections["mpiexec"] == {"error": "no mpiexec is beside python or in PATH"}
    assert sections["cores"]["cores_per_rank"] == sections["cores"]["usable_by_this_process"]
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "cores\n  in this machine " in shown
    assert re.search(r"\n  launcher +none: one rank has all cores; mpiexec shares them", shown)
    assert re.search(r"\n  cores per rank +[1-9]", shown)


def test_a_child_of_a_rank_starts_no_ranks(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so at once: it is no rank, so it must not start MPI to tell the others."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv(RANK_PROCESS, f"17|{rank_process._job()}||")
    for line in (["run", "-n", "2", script], ["run", script]):
        assert main(line) == 2
        said = capsys.readouterr().err
        assert "run must not be started by a rank: process 17 is rank 1 of 2, started by" in said
        assert said.count("\n") == 1


def test_a_child_of_a_rank_that_is_alone_starts_ranks_until_a_world_is_made(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell of `srun --pty`: it is only told how."""
    for name, value in {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "NTASKS": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for state, line in (
        ("", "run -n 2 must not be started by a launcher: this is already rank 0 of 1"),
        ("has made the world", "run must not be started by a rank: process 17 is rank 0 of 1"),
    ):
        monkeypatch.setenv(RANK_PROCESS, f"17|{rank_process._job()}||{state}")
        assert main(["run", "-n", "2", script]) == 2
        assert line in capsys.readouterr().err


def test_a_home_folder_where_the_environment_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    assert os.path.isabs(launcher._home_variable()["HOME"])
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nor has the user one
    with pytest.raises(NotADirectoryError):  # not where others could put settings or modules
        os.makedirs(f"{launcher._home_variable()['HOME']}/.openmpi")
