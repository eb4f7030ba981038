"""docs/tutorial.md shows what its commands print: those of the beginning are run.

Seconds may be others; losses, accuracies, bytes and samples are what the page says. Of lines with
`…` what stands beside it is looked for.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from jobs import PARALLEL_SGD, ROOT, executed

COMMANDS = (
    "python train.py --epochs 5 --output runs/one",
    "parallel-sgd run -n 4 train.py --epochs 5 --output runs/four",
)


def shown(command: str) -> list[str]:
    """The lines below a command of the page, but for that which says how ranks were started."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    (block,) = re.findall(rf"^\$ {re.escape(command)}\n(.*?)^(?:\$ |```)", page, re.DOTALL | re.M)
    lines = [line for line in block.splitlines() if not line.startswith("parallel-sgd:")]
    return [line for line in lines if line.strip() not in ("", "…")]


def form(line: str) -> str:
    """A line without its seconds, and with single spaces."""
    return " ".join(re.sub(r"\d+\.\d\d s\b", "N s", line).split())


@pytest.mark.any_mpi
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.rpartition("/")[2])
def test_what_the_tutorial_shows(folder: Path, command: str) -> None:
    (folder / "train.py").write_text((ROOT / "train.py").read_text())
    program, *arguments = shlex.split(command)
    words = PARALLEL_SGD if program == "parallel-sgd" else PARALLEL_SGD[:1]
    code, output = executed([*words, *arguments], folder=folder)
    assert code == 0
    printed, lines = [form(line) for line in output.splitlines()], shown(command)
    assert len(lines) >= 4
    for line in lines:
        parts = [form(part) for part in line.split("…")]
        assert any(all(part in each for part in parts) for each in printed), line
