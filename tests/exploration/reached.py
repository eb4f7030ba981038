"""Explore for a time, and list blocking places and branches of recovery that were not reached.

    python tests/exploration/reached.py --seconds 600

Needs coverage.py (`pip install coverage`), which no extra installs. Its tracing makes schedules
several times slower.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import coverage

PACKAGE = Path(__file__).parents[2] / "parallel_sgd"
ELSEWHERE = (
    *("communication/mpi", "communication/c10d", "communication/cuda", "communication/liveness"),
    *("communication/elastic/eviction", "communication/elastic/membership"),
    *("communication/elastic/ulfm", "command_line", "launcher", "cluster", "kernels", "torch"),
    *("testing", "data/readers", "exchange/nccl"),
)
"""Parts without a place in a simulated job of NumPy models: other transports, programs, GPUs."""

OF_RECOVERY = (
    *("training/recovery", "communication/elastic", "communication/threads/communicator"),
    *("parameter_server/assembly", "parameter_server/client", "parameter_server/connection"),
    *("parameter_server/roles", "parameter_server/served_state"),
    *("training/checkpoint/saver", "training/checkpoint/retention"),
    *("training/session/loop", "training/session/session", "training/session/best_model"),
    *("training/session/checkpointing", "training/session/preemption"),
)
REFUSAL = re.compile(r"raise (UserError|SharedError|Damaged|Malformed)\b")
"""Of arguments, files and messages that are wrong: other tests have them."""
BOUNDED = re.compile(r"\s*# bounded: ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--configuration", action="append", default=None, metavar="NAME")
    given = parser.parse_args()
    tracer = coverage.Coverage(
        source=[str(PACKAGE)], branch=True, concurrency="thread", data_file=None
    )
    tracer.start()
    from explored import CONFIGURATIONS  # imports the package: traced from its beginning
    from run_explored import seed_of_today, work

    seed = seed_of_today() if given.seed is None else given.seed
    names = given.configuration or list(CONFIGURATIONS)
    counts = work((0, 1), names, seed, time.monotonic() + given.seconds)
    tracer.stop()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        tracer.json_report(outfile=report.name)
        files: dict[str, Any] = json.load(report)["files"]
    total = sum(row["schedules"] for row in counts)
    print(f"{total} schedules of {len(counts)} configurations; seed {seed}")
    found = {Path(name).resolve().relative_to(PACKAGE): file for name, file in files.items()}
    print("\nBlocking places not reached:")
    reached = 0
    for path, file in sorted(found.items()):
        for line in blocking_places(path):
            if line in file["missing_lines"]:
                print(f"  {path}:{line}: {text_of(path, line)}")
            else:
                reached += 1
    print(f"  ({reached} others were reached)")
    print("\nOf recovery, not reached:")
    for path, file in sorted(found.items()):
        if not str(path).startswith(OF_RECOVERY) or str(path).startswith(ELSEWHERE):
            continue
        missing = set(file["missing_lines"])
        for line in sorted(missing):
            # The first line of several.
            if line - 1 not in missing and not REFUSAL.match(text_of(path, line)):
                print(f"  {path}:{line}: {text_of(path, line)}")
        for line, target in file["missing_branches"]:
            if line not in missing and abs(target) not in missing:
                where = f"line {target}" if target > 0 else "the end"
                print(f"  {path}:{line}: never goes to {where}: {text_of(path, line)}")
    return 0


def blocking_places(path: Path) -> list[int]:
    """Return the lines of statements that may block, by the comments above them."""
    if str(path).startswith(ELSEWHERE):
        return []
    lines = (PACKAGE / path).read_text().splitlines()
    places = []
    for number, line in enumerate(lines):
        if BOUNDED.match(line):
            after = number + 1
            while lines[after].lstrip().startswith("#"):
                after += 1
            places.append(after + 1)
    return places


def text_of(path: Path, line: int) -> str:
    return (PACKAGE / path).read_text().splitlines()[line - 1].strip()


if __name__ == "__main__":
    raise SystemExit(main())
