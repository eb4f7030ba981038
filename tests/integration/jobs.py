"""Runs `parallel-sgd …` of this checkout as a user would, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_sgd.communication.launched import without_launcher

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
ENVIRONMENT = without_launcher(os.environ) | {"PYTHONPATH": str(ROOT)}
TIMEOUT_S = 120
SECONDS = 30  #: what "within seconds" means for four starting ranks on two busy cores


def start(*arguments: str, folder: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "parallel_sgd", *arguments],
        env=ENVIRONMENT,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(*arguments: str, folder: Path | None = None) -> tuple[int, str]:
    """Exit code and all output."""
    with start(*arguments, folder=folder) as job:
        try:
            output, _ = job.communicate(timeout=TIMEOUT_S)
        except BaseException:
            job.kill()
            raise
    return job.returncode, output


TRAININGS = """
import contextlib, io, json, os, sys
from pathlib import Path
from parallel_sgd import Communicator
from parallel_sgd.command_line.train import main
from parallel_sgd.communication import abort


class Ended(BaseException):
    pass


def end_job(code, *, shared=False):
    raise Ended(code, shared)


comm = Communicator.world()
really, ends = abort.end_job, []
for arguments in json.loads(Path("trainings.json").read_text()):
    before, said, code, shared = set(os.listdir()), io.StringIO(), 0, False
    comm.barrier()
    abort.end_job = end_job
    try:
        with contextlib.redirect_stderr(said):
            main(arguments[comm.rank])
    except Ended as end:
        code, shared = end.args
    abort.end_job = really
    comm.barrier()
    end = {"code": code, "shared": shared, "said": said.getvalue()}
    ends.append({**end, "written": sorted({*os.listdir()} - before)})
    comm.barrier()
Path(f"ends-{comm.rank}.json").write_text(json.dumps(ends))
"""


@dataclass(frozen=True)
class End:
    """How one rank has come out of a training.

    Attributes:
        code: that it would have ended the job with.
        shared: whether it would have waited until all ranks had printed their errors.
        said: on stderr.
        written: what is in the folder that was not there before.
    """

    code: int
    shared: bool
    said: str
    written: list[str]


def trainings(
    folder: Path, *given: Sequence[str] | Sequence[Sequence[str]], ranks: int
) -> list[list[End]]:
    """How runs of train.py have ended, by rank: one after the other, in one start of the ranks.

    An error that would end the job only ends that run; a start takes longer than most of them.

    Args:
        given: the arguments of each run, or those of each rank.
    """
    each = [[line] * ranks if isinstance(line[0], str) else line for line in given]
    (folder / "trainings.json").write_text(json.dumps(each))
    (folder / "trainings.py").write_text(TRAININGS)
    code, output = finished("run", "-n", str(ranks), "trainings.py", folder=folder)
    assert code == 0, output
    ends = [json.loads((folder / f"ends-{rank}.json").read_text()) for rank in range(ranks)]
    return [[End(**end) for end in by_rank] for by_rank in zip(*ends, strict=True)]
