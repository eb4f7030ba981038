"""The tests of `tests/trainers`, on two ranks of torchrun; a job for each trainer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import patience

from parallel_sgd.communication import without_launcher

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 120  #: of a job


@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "transformers"])
def test_a_trainer(trainer: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"  # in one stream the lines of two ranks mix
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launch = (*launch, f"--log-dir={logs}", "--redirects=3")
    tests = ROOT / "tests" / "trainers" / f"test_{trainer}.py"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *launch,
            "-m",
            "pytest",
            "-x",
            "-q",
            f"--rootdir={ROOT}",
            str(tests),
        ],
        env=without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * patience(),
    )
    told = [log.read_text() for log in sorted(logs.rglob("stdout.log"))]
    print(done.stdout, done.stderr, *told, sep="\n")
    print(*(log.read_text() for log in sorted(logs.rglob("stderr.log"))), sep="\n")
    assert done.returncode == 0
    assert len(told) == 2
    assert all(re.search(r"^\d+ passed[^\n]* in ", rank, re.MULTILINE) for rank in told)
    assert not any("skipped" in rank for rank in told)
