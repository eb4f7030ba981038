"""The pages on coming from elsewhere: every name of ours in them is one.

In a table it is what stands in code in the column "here": `psgd.X`, an option of some class, a
`--flag` of a command, an attribute of a learner or a communicator. A row with ``<!-- session -->``
is about training sessions, and looked at once there are such.
"""

from __future__ import annotations

import builtins
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import parallel_sgd as psgd
from parallel_sgd import command_line, launcher
from parallel_sgd.algorithms import ALGORITHMS
from parallel_sgd.command_line import parser
from parallel_sgd.optimizers import OPTIMIZERS
from parallel_sgd.parameter_server import RemoteArray

torch = pytest.importorskip("torch")
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "migration.md", *sorted((DOCS / "migration").glob("*.md"))]
TORCH_LEARNER = psgd.torch.Learner

#: What variables are called on these pages, and what they are.
VARIABLES = {
    "comm": (psgd.Communicator, "rank", "size"),
    "learner": (psgd.Learner, "comm", "gradient", *dir(TORCH_LEARNER)),
    "checkpoints": (psgd.Checkpoints,),
    "source": (psgd.data.Source,),
    "counts": (RemoteArray,),
}
#: Words of PyTorch, of programs, and of the reader.
OTHERS = {
    *("torch", "autocast", "loss", "backward", "model", "register_comm_hook", "state"),
    *("python", "mpiexec", "metrics", "jsonl", "config", "folder", "extra", "hosts"),
    *("algorithm", "dataset", "delta", "rows"),
}


def public() -> list[Any]:
    """Everything that can be called, of which the arguments may be named."""
    modules = [psgd, psgd.data, psgd.schedules, psgd.torch, psgd.Communicator]
    found = [getattr(module, name) for module in modules for name in dir(module)]
    found += [*ALGORITHMS.values(), psgd.Checkpoints.save, TORCH_LEARNER.step]
    return [each for each in found if callable(each)]


def options() -> set[str]:
    """The names of all arguments of those."""
    names: set[str] = set()
    for each in public():
        try:
            names |= set(inspect.signature(each).parameters)
        except (TypeError, ValueError):
            continue
    return names


def flags() -> set[str]:
    """Those of all commands."""
    texts = [parser(name, other).format_help() for name in ALGORITHMS for other in OPTIMIZERS]
    rooms = [Path(room.__path__[0]) for room in (command_line, launcher)]
    texts += [module.read_text() for room in rooms for module in room.rglob("*.py")]
    return {flag for text in texts for flag in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)}


OPTIONS, FLAGS = options(), flags()
CHOICES = {"sync", "async", "bounded", "geo", "auto"}


def resolve(name: str) -> bool:
    """Whether `psgd.a.b` is there."""
    found: Any = psgd
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


def unknown(code: str) -> list[str]:
    """Names in a piece of code that ours should be, and are not."""
    wrong = [name for name in re.findall(r"psgd(?:\.\w+)+", code) if not resolve(name)]
    rest = re.sub(r"psgd(?:\.\w+)+", "", code)
    for variable, (kind, *more) in VARIABLES.items():
        for name in re.findall(rf"(?<![\w.]){variable}((?:\.\w+)+)", rest):
            first = name.split(".")[1]
            if not hasattr(kind, first) and first not in more:
                wrong.append(f"{variable}{name}")
        rest = re.sub(rf"(?<![\w.]){variable}(\.\w+)*", "", rest)
    found = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest)
    wrong += [flag for flag in found if flag not in FLAGS]
    rest = re.sub(r"(?<![\w-])--?[a-z][a-z-]*(?:[ =](?!parallel)[\w:.,-]+)?", "", rest)
    rest = re.sub(r'"[^"]*"', "", rest)
    known = OPTIONS | OTHERS | {*dir(builtins)} | CHOICES
    if not re.match(r"parallel-sgd |python ", code):
        names = re.findall(r"(?<![\w.~/])[a-z][a-z_0-9]{2,}(?![\w(]*/)", rest)
        wrong += [name for name in names if name not in known]
    return wrong


def ours(text: str) -> list[tuple[str, str]]:
    """Each row's first cell, and every piece of code in its column "here"."""
    found, in_table = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            in_table = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[-1] == "here":
            in_table = True
        elif in_table and ("<!-- session -->" not in line or hasattr(psgd, "TrainingSession")):
            found += [(cells[0], code) for code in re.findall(r"`([^`]+)`", cells[-1])]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_ours_exist(page):
    text = page.read_text()
    rows = ours(text)
    assert len(rows) > 10 or page.stem == "migration"
    wrong = {f"{row}: {code}": names for row, code in rows if (names := unknown(code))}
    outside = [name for name in re.findall(r"psgd(?:\.\w+)+", text) if not resolve(name)]
    assert (wrong, outside) == ({}, [])


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("psgd.DataParallelSDG", ["psgd.DataParallelSDG"]),
        ("psgd.torch.sampler(dataset, learner, minibatch_size)", []),
        ("gradient_bit=4", ["gradient_bit"]),
        ("sync_periods", ["sync_periods"]),
        ("learner.no_such()", ["learner.no_such"]),
        ("comm.local_rank", []),
        ("--syncperiod", ["--syncperiod"]),
        ("parallel-sgd run -n 4 --hostfiles hosts", ["--hostfiles"]),
        ('mode="sync", currency="deltas"', []),
    ],
)
def test_a_name_that_is_none_is_noticed(code, wrong):
    assert unknown(code) == wrong


def test_rows_about_sessions_wait_for_them():
    text = "| a | here |\n|---|---|\n| b <!-- session --> | `no_such` |\n| c | `other` |\n"
    expected = [("b <!-- session -->", "no_such")] * hasattr(psgd, "TrainingSession")
    assert ours(text) == [*expected, ("c", "other")]
