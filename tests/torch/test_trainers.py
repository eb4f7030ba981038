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
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    tests = ROOT / "tests" / "trainers" / f"test_{trainer}.py"
    done = subprocess.run(
        [sys.executable, "-m", *launch, "pytest", "-x", "-q", f"--rootdir={ROOT}", str(tests)],
        env=without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * patience(),
    )
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0
    assert len(re.findall(r"^\d+ passed[^\n]* in ", done.stdout, re.MULTILINE)) == 2
    assert "skipped" not in done.stdout
