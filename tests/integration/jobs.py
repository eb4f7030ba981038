"""Runs `parallel-sgd …` of this checkout as a user would, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from parallel_sgd.communication.launched import without_launcher

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
ENVIRONMENT = without_launcher(os.environ) | {"PYTHONPATH": str(ROOT)}
TIMEOUT_S = 120
SECONDS = 30  #: what "within seconds" means for four starting ranks on two busy cores


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "parallel_sgd", *arguments],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(*arguments: str) -> tuple[int, str]:
    """Exit code and all output."""
    with start(*arguments) as job:
        try:
            output, _ = job.communicate(timeout=TIMEOUT_S)
        except BaseException:
            job.kill()
            raise
    return job.returncode, output
