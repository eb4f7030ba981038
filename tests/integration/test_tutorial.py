"""docs/tutorial.md shows what its commands print: all that print the same each time are run.

Seconds may be others; losses, accuracies, bytes, samples and names of files are what the page says.
Of lines with `…` what stands beside it is looked for. The page's program is run, too. Where only
the figures matter, threads of one process train in place of ranks, which give the same. Not run are
commands that install or measure, those that train at the ranks' own pace, and those on
Fashion-MNIST.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from jobs import PARALLEL_SGD, ROOT, executed

FOUR = "parallel-sgd run -n 4 train.py --epochs 5"
HOSTS = "parallel-sgd cluster --hosts 4 --rate 100mbit -- parallel-sgd run -n 4 --hostfile hosts"
LARGER = "train.py --epochs 5 --hidden 512 512"

#: One after the other in a folder: what a command does is there for the next.
COMMANDS = {
    "one": ("python train.py --epochs 5 --output runs/one",),
    "four": (f"{FOUR} --output runs/four",),
    "bits4": (f"{FOUR} --gradient-bits 4 --compare-serial --output runs/bits4",),
    "bits1": (f"{FOUR} --gradient-bits 1 --compare-serial --output runs/bits1",),
    "own": ("parallel-sgd run -n 2 mine.py",),
    "saved": (
        f"{FOUR} --checkpoint-every 2000 --output runs/saved",
        "ls runs/saved/checkpoints",
        "parallel-sgd run -n 2 train.py --epochs 10 --resume runs/saved",
    ),
    "language": (
        "parallel-sgd run -n 4 examples/torch_language.py --model tiny --steps 60 "
        "--evaluate-every 30 --context 64",
    ),
    "hosts": (
        f"{HOSTS} {LARGER} --output runs/h32",
        f"{HOSTS} {LARGER} --gradient-bits 4 --output runs/h4",
    ),
    "simulated": (
        "parallel-sgd simulate -n 16 --algorithm block-momentum --sync-steps 4 --epochs 5 "
        "--output runs/simulated",
    ),
}

#: Whose numbers depend on how a processor rounds: a step is found by the length of messages.
ROUNDED = ("bits1", "own")

PAGE = (ROOT / "docs" / "tutorial.md").read_text()

#: Lines on how ranks were started, and how their links are.
OF_THIS_MACHINE = ("parallel-sgd:", "pipelined exchange")


def shown(command: str) -> list[str]:
    """The lines below a command of the page, but for those that say something of the machine."""
    page = re.sub(r" \\\n +", " ", PAGE)
    pattern = rf"^[$#] {re.escape(command)}\n(.*?)^(?:[$#] |```)"
    (block,) = re.findall(pattern, page, re.DOTALL | re.MULTILINE)
    lines = [line for line in block.splitlines() if not line.startswith(OF_THIS_MACHINE)]
    return [line for line in lines if line.strip() not in ("", "…")]


def form(line: str) -> str:
    """A line without its seconds, and with single spaces."""
    return " ".join(re.sub(r"\d+\.\d\d s\b", "N s", line).split())


NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def alike(line: str, printed: str) -> bool:
    """Whether lines have the same words, and numbers that differ by no more than 5 %."""
    pieces = re.split(rf"({NUMBER.pattern}|…)", line)
    patterns = {"…": ".*"} | dict.fromkeys(NUMBER.findall(line), f"({NUMBER.pattern})")
    found = re.fullmatch("".join(patterns.get(each, re.escape(each)) for each in pieces), printed)
    if found is None:
        return False
    shown_numbers, printed_numbers = (
        [float(number.replace(",", "")) for number in numbers]
        for numbers in (NUMBER.findall(line), found.groups())
    )
    return shown_numbers == pytest.approx(printed_numbers, rel=0.05)


def words_of(command: str) -> list[str]:
    """A command as it is run here."""
    with_options = [(FOUR, f" --{name}") for name in ("gradient-bits", "checkpoint-every")]
    for ranks, options in ((f"{HOSTS} train.py", ""), *with_options):
        threads = f"parallel-sgd simulate -n 4{ranks.partition('train.py')[2]}{options}"
        command = command.replace(f"{ranks}{options}", threads)
    program, *arguments = shlex.split(command)
    if program == "ls":
        return [program, *arguments]
    return [*(PARALLEL_SGD if program == "parallel-sgd" else PARALLEL_SGD[:1]), *arguments]


@pytest.mark.any_mpi
@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_tutorial_shows(folder: Path, name: str) -> None:
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "train.py").write_text((ROOT / "train.py").read_text())
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (folder / "mine.py").write_text(program)
    for command in COMMANDS[name]:
        code, output = executed(words_of(command), folder=folder)
        assert code == 0, output
        printed, lines = [form(line) for line in output.splitlines()], shown(command)
        assert lines
        for line in lines:
            if name in ROUNDED:
                assert any(alike(form(line), each) for each in printed), line
                continue
            parts = [form(part) for part in line.split("…")]
            assert any(all(part in each for part in parts) for each in printed), line
