"""Commands that are interrupted, or whose output is no longer read, end in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import parallel_sgd


@pytest.mark.parametrize("leaves", ["at once", "after a line"])
def test_a_training_that_nobody_reads_ends_in_one_line(tmp_path, leaves):
    """As in `parallel-sgd train | head -1`; also where that is only found out at the end."""
    command = [sys.executable, "-m", "parallel_sgd", "train", "--no-plot", "--output", "run"]
    words = ["--epochs", "2"] if leaves == "at once" else ["--epochs", "1000"]
    root = str(Path(parallel_sgd.__file__).parents[1])
    with subprocess.Popen(
        [*command, *words],
        env={**os.environ, "PYTHONPATH": root},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout and job.stderr
        if leaves == "after a line":
            job.stdout.readline()
        job.stdout.close()
        said = job.stderr.read()
    assert (job.returncode, said) == (
        1,
        "parallel-sgd: error: the reader of the printed output has exited\n",
    )


def default_interrupt() -> None:
    """In the child: also where what runs these tests ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("program", ["-m parallel_sgd info", "train.py", "-m rank"])
def test_ctrl_c_while_it_is_being_imported(tmp_path, program):
    """A numpy that is interrupted as soon as its import begins, and would turn that into another
    error, as NumPy does."""
    (tmp_path / "numpy.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('a bad install')\n"
    )
    root = Path(parallel_sgd.__file__).parents[1]
    words = {
        "train.py": [str(root / "train.py")],
        "-m rank": ["-m", "parallel_sgd.launcher.rank", "script.py"],
    }.get(program, program.split())
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=default_interrupt,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        -signal.SIGINT,
        "",
        "parallel-sgd: interrupted\n",
    )
