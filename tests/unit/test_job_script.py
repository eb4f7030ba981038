"""`parallel-sgd doctor --job`: the script for each kind of cluster, and when there is none."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel_sgd.__main__ import main
from parallel_sgd.command_line.doctor import checks, command, job_script
from parallel_sgd.command_line.doctor.job_script import JobScript, ranks_of_hosts
from parallel_sgd.communication import INTERFACE, without_launcher
from parallel_sgd.launcher import parse

ROOT = Path(__file__).parents[2]
TRAIN = ("train.py", "config.toml")
ALLOCATION = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_JOB_PARTITION": "long",
}
LOCAL = JobScript(TRAIN, (), (2,), None, {}, "/home/me")
SCRIPTS = {
    "local": LOCAL,
    "torchrun": replace(LOCAL, options=("--with", "torchrun"), ranks_of_hosts=(4,)),
    "hostfile": replace(
        LOCAL, options=("--hostfile", "hosts", "--interface", "eth0"), ranks_of_hosts=(4, 4)
    ),
    "slurm": replace(LOCAL, ranks_of_hosts=(2,) * 4, batch="Slurm", environ=ALLOCATION),
    "uneven slurm": replace(LOCAL, ranks_of_hosts=(3, 2), batch="Slurm", environ=ALLOCATION),
    "pbs": replace(LOCAL, ranks_of_hosts=(2, 2), batch="PBS"),
    "odd names": replace(
        LOCAL,
        command=("a 'b'.py", "--x", "$HOME", 'say "no"\nexit 1'),
        options=("--hostfile", "my hosts;"),
        environ={"FI_X": "$(exit 1) `exit 1`\n'", "FI_%": "no name for a shell"},
        folder="/tmp/$HOME\n'a",
    ),
}


def commands(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def started(text: str) -> list[str]:
    """The words behind `parallel-sgd run`."""
    run = text.partition("exec ")[2].partition(" run ")[2]
    return run.replace("\\\n", " ").split()


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_every_script(name: str) -> None:
    text = SCRIPTS[name].text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert text.startswith("#!/bin/bash\n") and commands(text)[0] == "set -euo pipefail"


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_runs_what_was_given(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word, the folder and the variables, also with quotes and line ends in them."""
    script = SCRIPTS[name]
    folder = tmp_path / Path(script.folder).name
    folder.mkdir()
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), {**os.environ}]))"
    monkeypatch.setattr(job_script, "_program", lambda: [sys.executable, "-c", show])
    text = replace(script, folder=str(folder)).text()
    done = subprocess.run(["bash"], input=text, text=True, check=True, stdout=subprocess.PIPE)
    words, here, environ = json.loads(done.stdout)
    assert words[0] == "run" and words[-len(script.command) :] == [*script.command]
    slurm = script.batch == "Slurm"
    added = ["--log-dir", "logs"] if slurm else []
    ranks = [] if slurm else ["-n", str(sum(script.ranks_of_hosts))]
    assert words[1 : -len(script.command)] == [*ranks, *script.options, *added]
    assert here == str(folder)
    assert environ.get("FI_X") == script.environ.get("FI_X")


def test_slurm_gets_what_the_doctor_was_given() -> None:
    text = SCRIPTS["slurm"].text()
    before = text.partition("\nset -e")[0].splitlines()
    assert [line for line in before if line.startswith("#SBATCH")] == [
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --partition=long",
    ]
    assert text.count("#SBATCH") == 4 and "-n" not in started(text)
    uneven = SCRIPTS["uneven slurm"].text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks=5\n" in uneven
    assert "#SBATCH" not in "".join(SCRIPTS[name].text() for name in ("local", "hostfile", "pbs"))
    assert "# Submit it to PBS, for 4 ranks on 2 hosts.\n" in SCRIPTS["pbs"].text()


def test_a_job_has_the_gpus_and_the_memory_of_the_allocation() -> None:
    more = {**ALLOCATION, "SLURM_GPUS_PER_NODE": "a100:4", "SLURM_MEM_PER_NODE": "204800"}
    text = replace(SCRIPTS["slurm"], environ=more).text()
    assert "#SBATCH --gpus-per-node=a100:4\n#SBATCH --mem=204800\n" in text


def test_a_value_of_slurm_adds_no_line() -> None:
    odd = {**ALLOCATION, "SLURM_JOB_PARTITION": "a\nrm x", "SLURM_JOB_ACCOUNT": "b c"}
    text = replace(SCRIPTS["slurm"], environ=odd).text()
    assert "partition" not in text and "account" not in text and "rm x" not in text


def test_the_page_has_the_same_recipe() -> None:
    """The lines of #SBATCH, and the options of the command, in docs/launching.md."""
    page = (ROOT / "docs" / "launching.md").read_text()
    (recipe,) = re.findall(
        r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    text = SCRIPTS["slurm"].text()
    for line in re.findall("#SBATCH .*", recipe):
        assert line in text.splitlines()
    assert "parallel-sgd run --log-dir logs train.py" in recipe
    assert started(text) == ["--log-dir", "logs", *TRAIN]


def test_variables_of_the_network_and_of_threads() -> None:
    environ = {
        **{"OMP_NUM_THREADS": "3", INTERFACE: "eth0", "OMPI_MCA_btl": "tcp,self", "HOME": "/root"},
        **{"PYTHONPATH": "/a b", "SLURM_JOB_ID": "7", "UCX_TLS": "tcp", "SECRET": "x"},
        "PATH": "/opt/mpi/bin:/bin",  # where a module has put its mpiexec
    }
    lines = replace(LOCAL, environ=environ).text().splitlines()
    assert [line for line in lines if line.startswith("export")] == [
        "export OMPI_MCA_btl=tcp,self",
        "export OMP_NUM_THREADS=3",
        f"export {INTERFACE}=eth0",
        "export PATH=/opt/mpi/bin:/bin",
        "export PYTHONPATH='/a b'",
        "export UCX_TLS=tcp",
    ]


def test_the_ranks_of_each_host() -> None:
    assert ranks_of_hosts(["a", "b", "a", "c", "a"]) == [3, 1, 1]


Found = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a program, where no launcher has started this process."""
    for name in set(os.environ) - set(without_launcher(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(command, "_check_mpi", lambda: checks.ok("mpi", "fits"))
    give(monkeypatch)
    return tmp_path


def give(
    monkeypatch: pytest.MonkeyPatch, levels: Mapping[str, str] | None = None, hosts: str = "aa"
) -> None:
    """Let ranks on these hosts find problems and warnings."""
    findings = [
        {"check": check, "level": level, "says": "wrong", "advice": "look"}
        for check, level in (levels or {}).items()
    ]
    found = {"findings": findings, "ranks": [{"host": host} for host in hosts], "pairs": []}
    monkeypatch.setattr(command, "_run_ranks", lambda args: dict(found))


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return main(["doctor", *words]), *capsys.readouterr()


def test_a_script_after_the_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, {"names": "warning"}, "abab")
    (folder / "hosts").write_text("a\nb\n")
    code, said, _ = doctor(capsys, "--hostfile", "hosts", "--interface", "eth0", "--job", "job.sh")
    assert code == 0
    assert said.splitlines()[-1] == "job.sh starts 4 ranks on 2 hosts: ./job.sh"
    text = (folder / "job.sh").read_text()
    assert started(text) == ["-n", "4", "--hostfile", "hosts", "--interface", "eth0", *TRAIN]
    assert f"\ncd {folder}\n" in text
    request = parse(started(text))
    assert (request.ranks, request.command) == (4, TRAIN)


@pytest.mark.parametrize(
    "words", [["--", "train.py", "--epochs", "3"], ["train.py", "--epochs", "3"]]
)
def test_the_program_is_given_behind_the_options(
    folder: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str]
) -> None:
    code, said, _ = doctor(capsys, "-n", "2", "--job", str(folder / "a b.sh"), *words)
    assert code == 0 and said.endswith(f": '{folder}/a b.sh'\n")
    assert started((folder / "a b.sh").read_text()) == ["-n", "2", "train.py", "--epochs", "3"]


def test_a_module_needs_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys, "--job", "job.sh", "--", "-m", "mine.train")[0] == 0
    assert started((folder / "job.sh").read_text())[-2:] == ["-m", "mine.train"]
    code, _, error = doctor(capsys, "--job", "job.sh", "--", "-m")
    assert code == 2 and error == "parallel-sgd: error: -m must be followed by a module\n"


def test_an_allocation_of_slurm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    give(monkeypatch, hosts="aabbccdd")
    code, said, _ = doctor(capsys, "--job", "job.sh")
    assert code == 0
    assert said.splitlines()[-1] == "job.sh starts 8 ranks on 4 hosts: sbatch ./job.sh"
    assert "#SBATCH --ntasks-per-node=2\n" in (folder / "job.sh").read_text()
    (folder / "hosts").write_text("a\n")  # a hostfile goes before the allocation, as in run
    assert doctor(capsys, "--hostfile", "hosts", "--job", "job.sh")[0] == 0
    assert "#SBATCH" not in (folder / "job.sh").read_text()


def test_slurm_without_an_allocation_is_hinted_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/usr/bin/{name}")
    code, said, _ = doctor(capsys, "--job", "job.sh")
    assert code == 0 and "run the doctor in an allocation: salloc" in said.splitlines()[-1]
    assert "#SBATCH" not in (folder / "job.sh").read_text()


def test_a_problem_leaves_no_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give(monkeypatch, {"links": "problem", "names": "warning", "versions": "problem"})
    code, said, _ = doctor(capsys, "--job", "job.sh")
    assert code == 1
    assert said.splitlines()[-1] == (
        "job.sh was not written: there is a problem with links, versions"
    )
    assert os.listdir(folder) == ["train.py"]


def test_a_problem_leaves_the_earlier_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(capsys, "--job", "job.sh")[0] == 0
    before = (folder / "job.sh").read_text()
    give(monkeypatch, {"links": "problem"}, "abcd")
    assert doctor(capsys, "--job", "job.sh")[0] == 1
    assert (folder / "job.sh").read_text() == before
    give(monkeypatch, hosts="abcd")
    assert doctor(capsys, "--job", "job.sh")[0] == 0
    assert started((folder / "job.sh").read_text())[:2] == ["-n", "4"]


@pytest.mark.parametrize("level", ["warning", "problem"])
def test_json_stays_alone_on_standard_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str
) -> None:
    give(monkeypatch, {"links": level})
    code, said, error = doctor(capsys, "--json", "--job", "job.sh")
    assert code == int(level == "problem") and len(json.loads(said)["ranks"]) == 2
    assert ("job.sh was not written" if code else "job.sh starts 2 ranks") in error


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_whoever_may_read_a_script_may_start_it(
    folder: Path, capsys: pytest.CaptureFixture[str], umask: int
) -> None:
    before = os.umask(umask)
    try:
        assert doctor(capsys, "--job", "job.sh")[0] == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "job.sh").stat().st_mode) == 0o755 & ~umask


def test_standard_output_is_no_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--job", "/dev/full"]) == 2
    assert capfd.readouterr().err == (
        "parallel-sgd: error: --job='/dev/full' cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--job", "/no/such/job.sh"], "--job=/no/such/job.sh must be a file in a folder that"),
        (["--job", "."], "--job=. must be a file in a folder that exists"),
        (["--job", ""], "--job='' must be the path of a file"),
        (["--job", "/proc/job.sh"], "--job='/proc/job.sh' cannot be written: "),
        (["--job", "~nobody-here/x"], "--job='~nobody-here/x' must be in a home folder"),
        (["--job", "train.py", "train.py"], "--job='train.py' must be a new file, or a script"),
        (["--job", "job.sh", "none.py"], "script must exist: 'none.py' (in "),
        (["--job", "job.sh", "python", "train.py"], "script must exist: 'python' (in "),
        (["train.py", "config.toml"], "program='train.py config.toml' has no effect without --job"),
        (["--with", "srun"], "--with: invalid choice: 'srun'"),
        (["--with", "torchrun", "--hostfile", "h"], "--hostfile='h' must not be given with --with"),
    ],
)
def test_wrong_arguments_start_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
    message: str,
) -> None:
    monkeypatch.setattr(command, "_run_ranks", None)
    code, said, error = doctor(capsys, *words)
    assert (code, said) == (2, "")
    assert error.startswith(f"parallel-sgd: error: {message}") and error.count("\n") == 1
    assert os.listdir(folder) == ["train.py"]


@pytest.mark.parametrize("words", [["--job", "job.sh"], ["--with", "torchrun"], ["train.py"]])
def test_ranks_of_a_launcher_write_no_script(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: Sequence[str],
) -> None:
    for name, value in {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}.items():
        monkeypatch.setenv(name, value)
    code, _, error = doctor(capsys, *words)
    assert code == 2 and ", --job and a program must not be given if MPICH's mpiexec has" in error


def test_torchrun_needs_pytorch() -> None:
    (found,) = checks.torchrun(None)
    assert (found.level, found.says) == ("problem", "PyTorch is not installed") and found.advice
    (found,) = checks.torchrun("2.13")
    assert found.level == "ok" and "PyTorch 2.13" in found.says
