"""`parallel-sgd info --links` starts ranks and measures their links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from limits import patience

from parallel_sgd.communication import without_launcher


def test_links_of_ranks_that_are_started() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parallel_sgd", "info", "--links", "--json"],
        env=without_launcher(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["links"]
    assert report["ranks"] == 2
    assert report["link"]["bytes_per_s"] > 1e7
    assert [row["values"] for row in report["exchanges"]] == [250_000, 2_500_000, 25_000_000]
    assert all(min(row["seconds"].values()) > 0 for row in report["exchanges"])
