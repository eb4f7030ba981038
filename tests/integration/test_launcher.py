"""`parallel-sgd run` for real, on the MPI of this environment: worlds, exit codes, errors, signals.

Set PARALLEL_SGD_OTHER_MPIEXEC to the mpiexec of another MPI to test that mix-up too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from jobs import PARALLEL_SGD, SECONDS, alive, by_ranks, executed, started, within

from parallel_sgd.launcher import Mpiexec, Request, bound_mpi, choose_mpiexec, plan

RANKS = 3

#: Every script begins like this: a world of the right size, and a word from each rank.
WORLD = f"""
import os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert comm.size == {RANKS}, comm.size
print("rank", comm.rank, "is up", flush=True)
"""

#: The other ranks wait for rank 1, which never comes.
WAIT = "\ncomm.Barrier()\n"

#: Other scripts begin like this, before MPI is up.
EARLY = """
import sys, time
from parallel_sgd.communication import Communicator
from parallel_sgd.communication.liveness import abort
from parallel_sgd.communication import launched_rank
"""


@pytest.fixture(scope="session")
def mpi() -> str:
    """The vendor of the MPI that mpi4py is bound to."""
    return str(bound_mpi()["vendor"])


def execute(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and all output of a command, which must end within seconds."""
    return executed(command, timeout_s=SECONDS)


def run(script: str, *arguments: str) -> tuple[int, str]:
    """`parallel-sgd run -n 3` of a script's text, in the working directory."""
    Path("script.py").write_text(script)
    return execute([*PARALLEL_SGD, "run", "-n", str(RANKS), "script.py", *arguments])


def mpiexec_command(mpiexec: Mpiexec, *program: str) -> list[str]:
    """A plain mpiexec, with the options that this machine makes necessary."""
    asked = Request(RANKS, ())
    launch = plan(asked, mpiexec, {}, cores=1, root=os.geteuid() == 0)
    return [*launch.command[: launch.command.index(sys.executable)], sys.executable, *program]


def test_every_rank_runs_the_script_as_python_would(folder: Path) -> None:
    (folder / "beside.py").write_text("value = 7\n")
    code, output = run(
        WORLD + "import beside\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].__file__ == __file__\n"
        f"assert os.path.realpath(sys.path[0]) == os.path.realpath({str(folder)!r}), sys.path\n"
        "assert sys.argv == ['script.py', '--lr', '0.1', '-n', '9'], sys.argv\n"
        "assert os.environ['NUMBA_NUM_THREADS'].isdecimal()\n"
        "assert sys.stdin.read() == '' and not sys.stdin.isatty()\n"
        "assert comm.allreduce(beside.value) == 21\n",
        *("--lr", "0.1", "-n", "9"),
    )
    assert code == 0, output
    assert output.splitlines()[0].startswith("parallel-sgd: ")
    assert f" -n {RANKS} " in output.splitlines()[0]
    assert [f"rank {k} is up" in output for k in range(RANKS)] == [True] * RANKS


def test_a_module_and_both_hostfile_dialects(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "part.py").write_text(
        WORLD + "assert sys.argv[1:] == ['-m', 'x'], sys.argv\n"
    )
    for text in (
        "# here\nlocalhost slots=2 # two\n",
        "localhost:2\n",
        "\ufefflocalhost slots=1\r\nlocalhost slots=1\r\n",  # neither mpiexec takes this
    ):
        (folder / "hosts").write_text(text)
        command = [*PARALLEL_SGD, "run", "-n", str(RANKS)]
        code, output = execute([*command, "--hostfile", "hosts", "-m", "package.part", "-m", "x"])
        assert code == 0, output
        assert output.count("is up") == RANKS


def test_an_exception_on_one_rank_ends_the_job(folder: Path) -> None:
    code, output = run(
        WORLD + "def fail():\n    raise RuntimeError('boom')\nif comm.rank == 1:\n    fail()" + WAIT
    )
    assert code == 1, output
    assert "[rank 1] Traceback (most recent call last):\n[rank 1]   File " in output
    assert "[rank 1]     raise RuntimeError('boom')\n" in output
    assert "[rank 1] RuntimeError: boom\n" in output
    assert "runpy" not in output
    assert "[rank 0]" not in output


BOOM = "if launched_rank() == 1:\n    raise RuntimeError('boom')"
EXIT = "if launched_rank() == 1:\n    sys.exit(3)"
REFUSE = "\nfrom parallel_sgd import UserError\nraise UserError('bits must be 1: 3')"


@pytest.mark.parametrize(
    ("script", "code", "said", "by"),
    [
        (EARLY + BOOM + WORLD + WAIT, 1, "RuntimeError: boom", {1}),
        (EARLY + WORLD + "MPI.Finalize()\n" + BOOM, 1, "RuntimeError: boom", {1}),
        (EARLY + EXIT + WORLD + WAIT, 3, "sys.exit(3) on this rank ends the job on all ranks", {1}),
        (WORLD + "comm.Barrier()" + REFUSE, 1, "bits must be 1: 3 (script.py:9)", {0, 1, 2}),
    ],
    ids=["before MPI is up", "after MPI is down", "sys.exit before MPI is up", "on all ranks"],
)
def test_an_end_with_an_error(
    folder: Path, script: str, code: int, said: str, by: set[int]
) -> None:
    ended, output = run(script)
    assert ended == code, output
    line = rf"(?:parallel-sgd: error: )?{re.escape(said)}"
    assert {rank for rank, text in by_ranks(output) if re.fullmatch(line, text)} == by
    assert ("Traceback" in output) == (BOOM in script)


def test_a_module_that_is_missing(folder: Path) -> None:
    code, output = execute([*PARALLEL_SGD, "run", "-n", str(RANKS), "-m", "no.such"])
    assert code == 1, output
    assert "No module named 'no'" in output


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_to_the_launcher_ends_every_rank(folder: Path, name: str) -> None:
    if name == "SIGKILL" and not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells a child that its parent was killed")
    Path("script.py").write_text(
        WORLD + "open(f'up-{comm.rank}', 'w').write(f'{os.getpid()} ')\n"
        "if comm.rank == 1:\n    time.sleep(60)" + WAIT
    )
    with started([*PARALLEL_SGD, "run", "-n", str(RANKS), "script.py"]) as job:
        files = [folder / f"up-{rank}" for rank in range(RANKS)]
        up = lambda: all(file.exists() and file.read_text()[-1:] == " " for file in files)  # noqa: E731
        assert within(SECONDS, up)
        ranks = [int(file.read_text()) for file in files]
        assert all(alive(pid) for pid in ranks)
        number = signal.Signals[name]
        job.send_signal(number)
        assert within(SECONDS, lambda: job.poll() is not None)
        assert job.returncode == (-number if name == "SIGKILL" else 128 + number)
        assert within(SECONDS, lambda: not any(alive(pid) for pid in ranks))


@pytest.mark.parametrize(
    "script",
    [
        EARLY + "abort.install_excepthook()" + WORLD + BOOM + WAIT,
        # as `import parallel_sgd` does
        EARLY + "abort.install_excepthook_if_launched()\n" + BOOM + WORLD + WAIT,
    ],
    ids=["in the world", "before it"],
)
def test_an_exception_in_plain_mpiexec(folder: Path, mpi: str, script: str) -> None:
    (folder / "script.py").write_text(script)
    code, output = execute(mpiexec_command(choose_mpiexec(mpi), "script.py"))
    assert code == 1, output
    assert "[rank 1] Traceback (most recent call last):\n" in output
    assert "[rank 1] RuntimeError: boom\n" in output


LATE = "Communicator.world(timeout_s=1)\n"
ALL = "Communicator.world().barrier()\n"


@pytest.mark.parametrize(
    ("script", "waiting"),
    [
        ("if launched_rank() == 1:\n    sys.exit(0)\n" + LATE, "02"),
        ("if launched_rank() == 1:\n    time.sleep(90)\n" + LATE, "02"),
        (ALL + "if launched_rank() == 0:\n    " + LATE + "time.sleep(90)\n", "0"),
    ],
    ids=["left", "asleep", "twice on one rank"],
)
def test_a_world_that_not_all_ranks_enter(
    folder: Path, mpi: str, script: str, waiting: str
) -> None:
    (folder / "script.py").write_text(EARLY + script)
    code, output = execute(mpiexec_command(choose_mpiexec(mpi), "script.py"))
    assert code != 0, output
    if 'did not call "init" before exiting' in output:  # Open MPI's mpiexec was quicker
        return
    said = re.findall(r"\[rank (\d)\] parallel_sgd: waited more than timeout_s=1 s", output)
    assert said, output
    assert set(said) <= set(waiting)
    assert "in Communicator.world():" in output


def test_info(folder: Path, mpi: str) -> None:
    code, output = execute([*PARALLEL_SGD, "info", "--json"])
    assert code == 0, output
    report = json.loads(output)
    assert report["mpi"]["vendor"] == mpi
    assert report["mpi"]["thread_level"] == "multiple"
    assert report["mpiexec"]["matches_mpi"] is True
    assert report["cores"]["usable_by_this_process"] >= 1
    assert report["cores"]["launcher"].startswith("none")
    assert report["cores"]["cores_per_rank"] == report["cores"]["usable_by_this_process"]


def test_info_under_mpiexec(folder: Path, mpi: str) -> None:
    mpiexec = choose_mpiexec(mpi)
    code, output = execute(mpiexec_command(mpiexec, "-m", "parallel_sgd", "info"))
    assert code == 0, output
    lines = [line.split("  ") for line in output.splitlines()]
    table = {line[1]: line[-1].strip() for line in lines if len(line) > 2}
    assert table["vendor"] == mpiexec.vendor
    assert table["ranks on this node"] == str(RANKS)
    assert int(table["cores per rank"]) >= 1
    assert output.count("\nMPI\n") == 1


def test_info_on_ranks_ends_where_one_of_them_cannot_place_a_model(folder: Path, mpi: str) -> None:
    for rank in range(1, RANKS):
        np.savez(folder / f"model-{rank}.npz", W=np.zeros(3, np.float32))
    (folder / "script.py").write_text(
        "import sys\n"
        "from parallel_sgd.command_line.main import main\n"
        "from parallel_sgd.communication.job_environment import launched_rank\n"
        "model = f'model-{launched_rank()}.npz'\n"
        "sys.exit(main(['info', '--links', '--servers', '2', '--model', model]))\n"
    )
    code, output = execute(mpiexec_command(choose_mpiexec(mpi), "script.py"))
    assert code != 0, output
    assert "[rank 0] parallel-sgd: error: model-0.npz: there is no such file\n" in output


@pytest.mark.skipif(
    "PARALLEL_SGD_OTHER_MPIEXEC" not in os.environ,
    reason="PARALLEL_SGD_OTHER_MPIEXEC does not name the mpiexec of another MPI",
)
def test_the_mpiexec_of_another_mpi(folder: Path, mpi: str) -> None:
    other = os.environ["PARALLEL_SGD_OTHER_MPIEXEC"]
    (folder / "plain.py").write_text(
        "from mpi4py import MPI\n"
        "from parallel_sgd.communication.entry_point import abort_on_error\n"
        "from parallel_sgd.communication.world_size import require_whole\n"
        "with abort_on_error():\n"
        "    require_whole(MPI.COMM_WORLD.size, MPI.get_vendor()[0])\n"
        "print('all is well')\n"
    )
    vendor = "MPICH" if mpi == "Open MPI" else "Open MPI"
    code, output = execute(mpiexec_command(Mpiexec(other, vendor, None), "plain.py"))
    assert code != 0, output
    assert "all is well" not in output
    if vendor == "MPICH":  # MPICH's library itself refuses Open MPI's mpiexec
        # No rank knows of the others: the first that ends may take them with it before they say so.
        said = re.findall(r"^\[rank \d\] (.*)$", output, re.MULTILINE)
        assert said, output
        for line in said:
            assert "parallel-sgd: error: MPICH's mpiexec started 3 ranks, but" in line
