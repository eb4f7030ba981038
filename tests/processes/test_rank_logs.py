"""Files and streams that a rank writes to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from limits import patience

WRITES = """
import os, sys
from parallel_sgd.launcher.rank_logs import redirect_output
redirect_output("logs", int(sys.argv[1]))
print("out of", sys.argv[1], flush=True)
os.write(2, b"error\\n")
os.killpg(0, 9)  # as some launchers end a rank, with all that it has started
"""


@pytest.mark.parametrize(("number", "shown"), [(0, "out of 0\n"), (3, "")])
def test_nothing_that_a_killed_rank_has_written_is_lost(
    number: int, shown: str, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / f"rank-{number}.err").write_text("before\n")
    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(number)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        start_new_session=True,
        text=True,
        timeout=60 * patience(),
    )
    assert done.returncode == -signal.SIGKILL
    assert (done.stdout, done.stderr) == (shown, "error\n")
    read = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert read == {f"rank-{number}.out": f"out of {number}\n",
                    f"rank-{number}.err": "before\nerror\n"}  # fmt: skip


FULL_LOG = """
from parallel_sgd.launcher.rank_logs import redirect_output
from parallel_sgd.communication import print_labelled
from disks import files_of_at_most
redirect_output("logs", 3)
with files_of_at_most(0):
    print_labelled("parallel-sgd: error: what has gone wrong")
"""


def test_what_a_full_disk_does_not_take_is_told_on_the_terminal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_LOG],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert "parallel-sgd: error: what has gone wrong\n" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_programs_run_without_standard_streams(closed: str, tmp_path: Path) -> None:
    """What is printed goes nowhere: above all not into a file that has got its number."""
    program = f'"{sys.executable}" -m parallel_sgd.launcher.rank script.py'
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "open('file', 'w').close()\n"
        "kept = open('file', 'r+')\n"
        "os.write(1, b'out')\n"
        "os.write(2, b'err')\n"
        "print('out', sys.stdout.isatty(), sys.stderr.isatty())\n"
        "sys.stdout.flush()\n"
        "open('done', 'w').close()\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["sh", "-c", f"{program} {closed}"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, timeout=60 * patience()
    )
    assert done.returncode == 0 and (tmp_path / "done").exists()
    assert (tmp_path / "file").read_text() == ""
