"""What happens where parallel_sgd is used wrongly: each misuse, run for real, and what came of it.

`python tests/integration/misuses.py docs/misuse.md` writes what it sees on this environment's MPI
into the table there, beside what was seen on the other (`make misuse`: on both); `test_misuse` sees
it anew, and compares. A new misuse is a line in `misuse_table.py`.

What many misuses need only once is shared: programs of ranks whose errors all ranks share run one
after the other in one start of the ranks, where an error ends the program and not the job; command
lines of one process run in one interpreter. `job` starts ranks of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jobs import (
    ENVIRONMENT,
    PARALLEL_SGD,
    SECONDS,
    End,
    by_ranks,
    executed,
    programs,
    started,
    training,
    within,
)

from parallel_sgd.launcher import THREAD_VARIABLES, bound_mpi

RANKS = 3
MPIS = ("MPICH", "Open MPI")
HEAD = ["misuse", "command or program", "what is printed", "by rank", "within", "exit code"]

#: Beside every program, which begins with `from beside import *`.
BESIDE = Path(__file__).with_name("beside.py")

#: Runs command lines in one interpreter.
COMMANDS = """
import contextlib, io, json, sys, time
from pathlib import Path
from parallel_sgd.__main__ import main
ends = []
for line in json.loads(sys.argv[1]):
    said, began = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(line)
        except SystemExit as end:
            code = end.code
    ends.append([code, said.getvalue(), time.monotonic() - began])
Path("ends.json").write_text(json.dumps(ends))
"""


@dataclass(frozen=True)
class Misuse:
    """
    Args:
        name: what is done wrong.
        shown: the command line or the program, as the table shows it.
        command: of one process, the arguments of `parallel-sgd`.
        texts: of programs in a shared start, what each rank executes.
        job: the whole command that starts ranks, in a folder with `program` as script.py.
        signal: sent to that command when all ranks are up.
        code: what to show of the exit code, where mpiexec's is now this and now that, and never 0.
        some: which ranks may be those that print it; all that can must, if not given.
        mpi: the only one on which it makes sense.
        within_s: how long it may take, on a machine that is not busy.
    """

    name: str
    shown: str
    within_s: int
    command: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    program: str = ""
    signal: str = ""
    some: str = ""
    code: str = ""
    mpi: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a misuse, in the words of the table; see `HEAD`."""

    printed: str
    ranks: str
    seconds: float
    code: str


def command(name: str, line: str) -> Misuse:
    """A command line of one process."""
    return Misuse(name, f"parallel-sgd {line}", 2, command=tuple(shlex.split(line)))


def train(name: str, *lines: str) -> Misuse:
    """Options of train.py, on all ranks, or those of each."""
    shown = [f"train.py {lines[0]}"]
    if len(lines) > 1:
        shown = [f"on rank {k}: train.py {line}" for k, line in enumerate(lines) if line]
    by_rank = lines if len(lines) > 1 else lines * RANKS
    texts = tuple(training([*shlex.split(line), "--no-plot"]) for line in by_rank)
    return Misuse(name, "\n".join(shown), 5, texts=texts)


def program(
    name: str, text: str, *, before: str = "", shown: str = "", within_s: int = 2
) -> Misuse:
    """A program whose error comes to all ranks, or which is warned of.

    Args:
        before: a line that prepares it, and is not shown.
        shown: what is, in place of the program.
    """
    texts = (f"from beside import *\n{before}\n{text}",) * RANKS
    return Misuse(name, shown or text, within_s, texts=texts)


def job(name: str, text: str, options: str = "", *, within_s: int = 10, **how: str) -> Misuse:
    """A program that ends the job, for real."""
    line = (*PARALLEL_SGD, "run", "-n", str(RANKS), *shlex.split(options), "script.py")
    shown = f"parallel-sgd run -n {RANKS} {options} script.py\n{text}" if options else text
    text = f"from beside import *\n{text}"
    return Misuse(name, shown, within_s, job=line, program=text, **how)


def seen(misuses: Sequence[Misuse], folder: Path) -> dict[str, Outcome]:
    """What comes of these misuses, by name: those that this MPI has.

    Args:
        folder: an empty one, and any files that programs need.
    """
    mpi = this_mpi()
    here = [misuse for misuse in misuses if misuse.mpi in ("", mpi)]
    assert len({misuse.name for misuse in here}) == len(here), "two misuses of one name"
    shutil.copy(BESIDE, folder)
    with ThreadPoolExecutor(2) as pool:  # the ranks of a job mostly start, or wait
        jobs = {
            misuse.name: pool.submit(of_job, misuse, copied(folder, number))
            for number, misuse in enumerate(here)
            if misuse.job
        }
        outcomes = of_commands([misuse for misuse in here if misuse.command], folder)
        outcomes |= of_programs([misuse for misuse in here if misuse.texts], folder)
        return outcomes | {name: future.result() for name, future in jobs.items()}


def copied(folder: Path, number: int) -> Path:
    target = folder.with_name(f"{folder.name}-{number}")
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("pipe.npz"))
    return target


def of_commands(misuses: Sequence[Misuse], folder: Path) -> dict[str, Outcome]:
    lines = json.dumps([misuse.command for misuse in misuses])
    one_thread = dict.fromkeys(THREAD_VARIABLES, "1")  # else `simulate` starts itself anew
    program = [sys.executable, "-c", COMMANDS, lines]
    code, output = executed(program, folder=folder, environ=ENVIRONMENT | one_thread)
    assert code == 0, output
    ends, outcomes = json.loads((folder / "ends.json").read_text()), {}
    for misuse, (ended, said, seconds) in zip(misuses, ends, strict=True):
        outcomes[misuse.name] = Outcome(essential(said, folder)[0], "-", seconds, str(ended))
    return outcomes


def of_programs(misuses: Sequence[Misuse], folder: Path) -> dict[str, Outcome]:
    ends = programs(folder, [misuse.texts for misuse in misuses], ranks=RANKS)
    return {m.name: of_ends(by, folder) for m, by in zip(misuses, ends, strict=True)}


def of_ends(by_rank: Sequence[End], folder: Path) -> Outcome:
    said = "".join(labelled(end.said, rank) for rank, end in enumerate(by_rank))
    printed, ranks = essential(said, folder)
    codes = sorted({end.code for end in by_rank if end.code})
    seconds = max(end.seconds for end in by_rank)
    return Outcome(printed, ranks, seconds, " or ".join(map(str, codes)) or "0")


def labelled(said: str, rank: int) -> str:
    """What a rank has said, all of it with its number: Python's warnings have none."""
    lines = said.splitlines()
    return "".join(f"{'' if line[:5] == '[rank' else f'[rank {rank}] '}{line}\n" for line in lines)


def of_job(misuse: Misuse, folder: Path) -> Outcome:
    up = "Path(f'up-{comm.rank}').touch()\n" if misuse.signal else ""
    first, _, rest = misuse.program.partition("\n")
    (folder / "script.py").write_text(f"{first}\n{up}{rest}\n")
    began = time.monotonic()
    with started(misuse.job, folder=folder, output=folder / "output") as run:
        if misuse.signal:
            assert within(SECONDS, lambda: len([*folder.glob("up-*")]) == RANKS), misuse.name
            began = time.monotonic()
            run.send_signal(signal.Signals[misuse.signal])
        assert within(SECONDS, lambda: run.poll() is not None), f"{misuse.name}: does not end"
        seconds = time.monotonic() - began
    printed, ranks = essential((folder / "output").read_text(), folder)
    if misuse.some and {*re.findall(r"\d", ranks)} & {*misuse.some}:
        assert {*re.findall(r"\d", ranks)} <= {*misuse.some}, (misuse.name, ranks)
        ranks = f"some of {', '.join(misuse.some)}"
    code = misuse.code if misuse.code and run.returncode else str(run.returncode)
    return Outcome(printed, ranks, seconds, code)


#: What tells of the end, the clearest first.
TELLING = (
    r"(parallel-sgd: error: |parallel_sgd: waited|which has finished|interrupted|"
    r": the job was ended)",
    r"^[\w.]*(Error|Exception|Interrupt)\b",
    r"^UserWarning: ",
    r"(exited on signal|EXIT STRING|exited with status|non-zero)",
)


def essential(output: str, folder: Path) -> tuple[str, str]:
    """The line that tells why it ended, and the ranks that print it."""
    output = re.sub(r"(noticed that .* exited on)\n", r"\1 ", output)  # one sentence, two lines
    told = [(rank, usual(text, folder)) for rank, text in by_ranks(output)]
    for telling in TELLING:
        fitting = sorted(
            {("" if k is None else str(k), text) for k, text in told if re.search(telling, text)}
        )
        if fitting:
            text = fitting[0][1]
            ranks = [k or "mpiexec" for k, other in fitting if other == text]
            ours = re.match(r"parallel-sgd: |parallel_sgd\.errors\.", text)
            by = "-" if ranks == ["mpiexec"] and ours else ", ".join(ranks)
            return text, by
    return "nothing", "-"


def usual(line: str, folder: Path) -> str:
    """Without what is another on every run, nor where in a program it is."""
    line = re.sub(rf"{re.escape(str(folder.parent))}/[\w.-]+", "…", line)
    line = re.sub(r" \((script|beside)\.py:\d+\)$|, script\.py:\d+$", "", line)
    line = re.sub(r"\. Exit code \d+( is|:) .*$", "", line)
    line = re.sub(r"^script\.py:\d+: (?=UserWarning: )", "", line)
    line = re.sub(r"\S+/bin/mpiexec", "…/bin/mpiexec", line)
    line = re.sub(rf"\b{re.escape(os.uname().nodename)}\b", "HOST", line)
    line = re.sub(r"(of learner|memory has) [\d,]+", r"\1 …", line)
    line = re.sub(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b", "…", line)
    return re.sub(r"\b(PID|pid|process) \d+", r"\1 …", line).strip()


def this_mpi() -> str:
    vendor = str(bound_mpi(initialize=False)["vendor"])
    return next(mpi for mpi in MPIS if vendor.startswith(mpi))


Cells = dict[str, dict[str, dict[str, str]]]  #: by misuse, column and MPI


def cells_of(text: str) -> Cells:
    """What a table says."""
    cells: Cells = {}
    for line in text.splitlines():
        parts = [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(parts) == len(HEAD) and parts != HEAD and set(parts[0]) != {"-"}:
            name, _, *values = parts
            cells[name] = dict(zip(HEAD[2:], map(by_mpi, values), strict=True))
    return cells


def by_mpi(cell: str) -> dict[str, str]:
    parts = dict(re.findall(r"(MPICH|Open MPI): (.*?)(?:<br>|$)", cell))
    return parts or dict.fromkeys(MPIS, cell)


def joined(values: Mapping[str, str]) -> str:
    alike = len(values) == len(MPIS) and len(set(values.values())) == 1
    if alike:
        return next(iter(values.values()))
    return "<br>".join(f"{mpi}: {values[mpi]}" for mpi in MPIS if mpi in values)


def updated(before: Cells, misuses: Iterable[Misuse], outcomes: Mapping[str, Outcome]) -> Cells:
    """With what was seen on this MPI."""
    mpi, after = this_mpi(), dict(before)
    for misuse in misuses:
        columns = {column: dict(before.get(misuse.name, {}).get(column, {})) for column in HEAD[2:]}
        if outcome := outcomes.get(misuse.name):
            new = quoted(outcome.printed), outcome.ranks, f"{misuse.within_s} s", outcome.code
            for column, value in zip(HEAD[2:], new, strict=True):
                columns[column][mpi] = value
        after[misuse.name] = columns
    return after


def quoted(text: str) -> str:
    """As code, in a cell of a table."""
    if text == "nothing":
        return text
    tick = "``" if "`" in text else "`"
    inner = f" {text} " if "`" in text else text
    return f"{tick}{inner}{tick}".replace("|", "\\|")


def table(sections: Mapping[str, Iterable[Misuse]], cells: Cells) -> str:
    """The tables of all sections."""
    lines = []
    for title, misuses in sections.items():
        lines += ["", f"## {title}", "", row(HEAD), row(["---"] * len(HEAD))]
        for misuse in misuses:
            shown = "<br>".join(map(quoted, misuse.shown.splitlines()))
            columns = cells[misuse.name]
            lines.append(row([misuse.name, shown, *(joined(columns[c]) for c in HEAD[2:])]))
    return "\n".join([*lines, ""])


def row(parts: Iterable[str]) -> str:
    return f"| {' | '.join(parts)} |"


def main(document: str) -> None:
    from misuse_table import MISUSES, SECTIONS, prepared

    path = Path(document).resolve()
    text = path.read_text()
    head = text[: text.index("\n## ")] if "\n## " in text else text.rstrip("\n")
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = seen(MISUSES, prepared(Path(scratch)))
    cells = updated(cells_of(text), MISUSES, outcomes)
    path.write_text(f"{head.rstrip()}\n{table(SECTIONS, cells)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
