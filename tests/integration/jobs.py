"""Runs `parallel-sgd …` of this checkout as a user would, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from limits import patience

from parallel_sgd.communication import without_launcher

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
TORCH = str(ROOT / "tests" / "integration" / "torch_job.py")
ENVIRONMENT = without_launcher(os.environ) | {"PYTHONPATH": str(ROOT)}
TIMEOUT_S = 90  #: how long a job may take on an idle machine; see `limits.patience`
SECONDS = 30  #: what "within seconds" means for four starting ranks on two busy cores

PARALLEL_SGD = (sys.executable, "-m", "parallel_sgd")


@contextmanager
def started(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    environ: Mapping[str, str] = ENVIRONMENT,
    output: str | Path = "output",
) -> Iterator[subprocess.Popen[str]]:
    """A process whose output goes to a file, which nobody can hold open; killed with all it left.

    Ctrl-C ends it, also where what runs the tests ignores that, as `make test &` does.
    """
    with open(output, "w") as file:
        job = subprocess.Popen(
            command,
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield job
    finally:
        kill(job)
        print(Path(output).read_text())  # for pytest, which shows it if the test fails


def finished(*arguments: str, folder: Path | None = None) -> tuple[int, str]:
    """Exit code and all output of `parallel-sgd …`."""
    return executed([*PARALLEL_SGD, *arguments], folder=folder)


def executed(
    command: Sequence[str],
    *,
    folder: Path | None = None,
    environ: Mapping[str, str] = ENVIRONMENT,
    timeout_s: float = TIMEOUT_S,
) -> tuple[int, str]:
    """Exit code and all output; a command that takes too long fails the test with its output."""
    with tempfile.NamedTemporaryFile("r") as output:
        with started(command, folder=folder, environ=environ, output=output.name) as job:
            ended = within(timeout_s, lambda: job.poll() is not None)
        if not ended:
            pytest.fail(f"{shlex.join(command)} ran longer than {timeout_s:g} s, and was killed")
        return job.returncode, output.read()


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Wait for something, longer on a busy machine; whether it has come."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds * patience():
            return False
        time.sleep(0.01)
    return True


def kill(job: subprocess.Popen[str]) -> None:
    """SIGKILL to everything at once that is left of a job: launcher, mpiexec and ranks."""
    if job.poll() is None:
        for pid in list(descendants(job.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    job.wait()


def descendants(pid: int) -> Iterator[int]:
    """A process and all that it has started, also in sessions of their own."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from descendants(int(child))


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead, and only not yet collected, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def data_files(folder: Path) -> None:
    """Data of three features: sound, with a label beyond four classes, and with a NaN."""
    x, y = np.ones((40, 3), np.float32), np.arange(40) % 4
    np.savez(folder / "good.npz", x=x, y=y)
    np.savez(folder / "labels.npz", x=x, y=np.where(y == 3, 17, y))
    np.savez(folder / "nan.npz", x=np.where(np.arange(40)[:, None] == 30, np.nan, x), y=y)


PROGRAMS = """
import contextlib, io, json, os, time
from pathlib import Path
from parallel_sgd import Communicator
from parallel_sgd.communication import entry_point


class Ended(BaseException):
    pass


def end_job(code, *, shared=False):
    raise Ended(code, shared)


comm = Communicator.world()
really, ends = entry_point.end_job, []
for number, texts in enumerate(json.loads(Path("programs.json").read_text())):
    print(f"program {number}:", texts[comm.rank], flush=True)  # which of them hangs
    before, said, code, shared = set(os.listdir()), io.StringIO(), 0, False
    comm.barrier()
    began, entry_point.end_job = time.monotonic(), end_job
    try:
        with contextlib.redirect_stderr(said), entry_point.abort_on_error():
            try:
                exec(compile(texts[comm.rank], "script.py", "exec"), {"__name__": "__main__"})
            except Ended as end:  # a command of ours has ended the job
                code, shared = end.args
    except Ended as end:
        code, shared = end.args
    except SystemExit:
        pass
    seconds, entry_point.end_job = time.monotonic() - began, really
    comm.barrier()
    end = {"code": code, "shared": shared, "said": said.getvalue(), "seconds": seconds}
    ends.append({**end, "written": sorted({*os.listdir()} - before)})
    comm.barrier()
Path(f"ends-{comm.rank}.json").write_text(json.dumps(ends))
"""


def by_ranks(output: str) -> list[tuple[int | None, str]]:
    """The lines of an output, each with the rank that says it, and once for each rank where the
    launcher has printed it for several; None: that is no rank's."""
    lines: list[tuple[int | None, str]] = []
    for line in output.splitlines():
        label, text = re.match(r"(?:\[ranks? ([\d, to]+)\] )?(.*)", line).groups()
        parts = [list(map(int, part.split(" to "))) for part in (label or "").split(", ") if part]
        ranks = [rank for part in parts for rank in range(part[0], part[-1] + 1)]
        lines += [(rank, text) for rank in ranks or [None]]
    return lines


@dataclass(frozen=True)
class End:
    """How one rank has come out of a program.

    Attributes:
        code: that it would have ended the job with.
        shared: whether it would have waited until all ranks had printed their errors.
        said: on stderr.
        seconds: from its start, at which the ranks are up.
        written: what is in the folder that was not there before.
    """

    code: int
    shared: bool
    said: str
    seconds: float
    written: list[str]


def programs(folder: Path, texts: Sequence[Sequence[str]], *, ranks: int) -> list[list[End]]:
    """How programs have ended, by rank: one after the other, in one start of the ranks.

    An error that would end the job only ends that program; a start takes longer than most of them.

    Args:
        texts: what each rank executes, for each program.
    """
    if not texts:
        return []
    (folder / "programs.json").write_text(json.dumps(texts))
    (folder / "programs.py").write_text(PROGRAMS)
    code, output = finished("run", "-n", str(ranks), "programs.py", folder=folder)
    assert code == 0, output
    ends = [json.loads((folder / f"ends-{rank}.json").read_text()) for rank in range(ranks)]
    return [[End(**end) for end in by_rank] for by_rank in zip(*ends, strict=True)]


def trainings(
    folder: Path, *given: Sequence[str] | Sequence[Sequence[str]], ranks: int
) -> list[list[End]]:
    """How runs of train.py have ended, by rank, in one start: see `programs`.

    Args:
        given: the arguments of each run, or those of each rank.
    """
    runs = [[line] * ranks if isinstance(line[0], str) else line for line in given]
    return programs(folder, [list(map(training, lines)) for lines in runs], ranks=ranks)


def training(arguments: Sequence[str]) -> str:
    """A program that does what train.py does with these arguments."""
    return f"from parallel_sgd.command_line.train.command import main\nmain({list(arguments)!r})\n"
