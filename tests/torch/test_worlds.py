"""Worlds without MPI: how ranks find each other, what is refused, and how a rank's end is found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from limits import patience

from parallel_sgd.communication import without_launcher

ROOT = Path(__file__).parents[2]
FORKED_RANKS = Path(__file__).with_name("forked_ranks.py")

HEAD = """
import os, signal, sys, time
import numpy as np
import parallel_sgd as psgd
import torch.distributed as dist

def error(call, *arguments):
    try:
        call(*arguments)
    except psgd.UserError as found:
        return str(found)
    return "no error"

def total(comm):
    return int(comm.sum_integers(np.array([10**comm.rank]))[0])
"""

#: What the ranks print, or say as they end.
STARTS = {
    "world": """
with psgd.Communicator.world() as comm:
    assert (comm.rank, comm.size) == (int(os.environ["RANK"]), 3)
    assert not dist.is_initialized() and comm.world_ranks == (0, 1, 2)
    psgd.torch.init_process_group(comm)
    assert dist.get_rank() == comm.rank and dist.get_world_size() == 3
    with psgd.Communicator.of_process_group() as whole, psgd.Communicator.world() as second:
        print(total(comm), total(whole), total(second), total(comm))
dist.destroy_process_group()
""",
    "default group": """
rank, port = int(os.environ.pop("RANK")), os.environ.pop("MASTER_PORT")
for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
    del os.environ[name]
address = f"tcp://127.0.0.1:{port}"
dist.init_process_group("gloo", rank=rank, world_size=3, init_method=address)
with psgd.Communicator.world() as comm:
    assert (comm.rank, comm.size) == (rank, 3)
    print(total(comm))
dist.destroy_process_group()
""",
    "subgroup": """
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 2])
if rank == 1:
    print(error(psgd.Communicator.of_process_group, group))
else:
    with psgd.Communicator.of_process_group(group) as comm:
        assert (comm.rank, comm.world_ranks) == (rank // 2, (0, 2))
        print(total(comm), error(comm.raise_together, "it is bad" if rank else None))
dist.barrier()
print(error(psgd.Communicator.of_process_group, "gloo"))
if rank != 1:
    dist.destroy_process_group(group)
    print(error(psgd.Communicator.of_process_group, group))
dist.destroy_process_group()
print(error(psgd.Communicator.of_process_group))
""",
    "child": """
with psgd.Communicator.world() as comm:
    child = os.fork()
    if not child:
        print(error(psgd.Communicator.world).replace(str(os.getppid()), "P"), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(total(comm))
""",
    "one": "with psgd.Communicator.world() as comm:\n    print(comm.size, total(comm))",
    "survive": "psgd.Communicator.world()",
    "beyond": "psgd.Communicator.world()",
    "nobody": "psgd.Communicator.world(timeout_s=2)",
    "no such host": "psgd.Communicator.world(timeout_s=2)",
    "missing": "psgd.Communicator.world(timeout_s=2)",
}
SIZES = {"one": 1, "beyond": 1, "nobody": 1, "no such host": 1, "missing": 1, "survive": 2}
ENVIRONS = {
    "survive": {"PARALLEL_SGD_SURVIVE": "1"},
    "beyond": {"RANK": "5", "WORLD_SIZE": "2"},
    "nobody": {"RANK": "1", "WORLD_SIZE": "2"},
    "no such host": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host.invalid"},
    "missing": {"RANK": "0", "WORLD_SIZE": "2"},
}

HOWS = {
    "raises": "raise ArithmeticError('of the program')",
    "is refused": "raise psgd.UserError('x must be above 0')",
    "sys.exit": "sys.exit(3)",
    "is killed": "os.kill(os.getpid(), 9)",
    "os._exit": "os._exit(4)",
    "ends early": "return True",
    "calls another": "comm.allgather(np.zeros(1), np.zeros(3), [1, 1, 1])",
    "stops": "os.kill(os.getpid(), signal.SIGSTOP)",
}
PLACES = {
    "collective": "comm.barrier()\nif not ends(7):\n    comm.barrier()",
    "background": "train(comm, 'background', 10**6, ends)",
    "server": "train(comm, 'server', 10**6, ends)",
}
#: Every end in a collective; elsewhere one that is found, one that is said, and one by a timeout.
ENDS = [(how, "collective") for how in HOWS]
ENDS += [(how, place) for how in ("is killed", "sys.exit", "stops") for place in [*PLACES][1:]]


def program(how: str, place: str) -> str:
    """What all ranks execute; rank 1 ends at its seventh step."""
    timeout_s = 3 if how == "stops" else 60
    return f"""{HEAD}
comm = psgd.Communicator.world(timeout_s={timeout_s})

def ends(step):
    if step == 7 and comm.rank == 1:
        {HOWS[how]}

{PLACES[place]}
"""


class End(NamedTuple):
    """How a rank has ended; its code is None if it had to be killed."""

    code: int | None
    seconds: float
    out: str
    err: str


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[End]]:
    """How the ranks of all jobs have ended, which share the start of Python."""
    folder, given = tmp_path_factory.mktemp("jobs"), {}
    for name, text in STARTS.items():
        given[name] = (HEAD + text, SIZES.get(name, 3), [], ENVIRONS.get(name, {}))
    for how, place in ENDS:
        given[how, place] = (program(how, place), 3, [1] if how == "stops" else [], {})
    names = ("program", "ranks", "stopped", "environ")
    texts = [dict(zip(names, job, strict=True)) for job in given.values()]
    (folder / "jobs.json").write_text(json.dumps(texts))
    environ = without_launcher(os.environ) | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environ.pop(name, None)
    done = subprocess.run(
        [sys.executable, str(FORKED_RANKS), str(folder)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200 * patience(),
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads((folder / "ends.json").read_text())
    assert len(ends) == len(given)
    return {name: [End(**rank) for rank in ranks] for name, ranks in zip(given, ends, strict=True)}


def printed(ends: list[End]) -> list[list[str]]:
    """The lines of each rank, which has ended well."""
    assert [(end.code, end.err) for end in ends] == [(0, "")] * len(ends)
    return [end.out.splitlines() for end in ends]


def test_ranks_find_each_other(jobs: Any) -> None:
    assert printed(jobs["world"]) == [["111 111 111 111"]] * 3
    assert printed(jobs["default group"]) == [["111"]] * 3
    assert printed(jobs["one"]) == [["1 1"]]


def test_process_groups(jobs: Any) -> None:
    zero, one, two = printed(jobs["subgroup"])
    no_group = "there is no process group of torch.distributed: call "
    kind = "group must be a process group of torch.distributed, or None: it is "
    assert one[0] == "this process is not in the process group"
    assert zero[0] == two[0] == "11 it is bad (on rank 2)"
    assert len(one) == 3 and len(zero) == len(two) == 4
    for said in (zero, one, two):
        assert said[1].startswith(kind) and said[-1].startswith(no_group)
    assert zero[2].startswith("the process group cannot be used: ")
    assert two[2].startswith("the process group cannot be used: ")


def test_a_child_of_a_rank_is_no_rank(jobs: Any) -> None:
    for rank, lines in enumerate(printed(jobs["child"])):
        assert lines[0].startswith(
            "Communicator.world() must be called in the process of a rank: "
            f"rank {rank} is process P, which has made the world and then started process "
        )
        assert lines[1:] == ["111"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("beyond", r"\[rank 5\] parallel-sgd: error: RANK=5 must be below WORLD_SIZE=2"),
        ("nobody", r"\[rank 1\] .*world\(\): .*the ranks cannot find each other: .+"),
        ("no such host", r"\[rank 1\] .*world\(\): .*the ranks cannot find each other: .+"),
        ("missing", r"\[rank 0\] .*the ranks cannot find each other: .*1/2 clients joined.*"),
    ],
)
def test_ranks_that_do_not_come(jobs: Any, name: str, line: str) -> None:
    """One line, in time, below what PyTorch says of its store."""
    (end,) = jobs[name]
    assert end.code == 1 and end.seconds < 10 * patience()
    lines = end.err.splitlines()
    assert re.fullmatch(rf"{line} \(program.py:\d+\)", lines[-1]), end.err
    assert "Traceback" not in end.err


def test_surviving_is_refused(jobs: Any) -> None:
    for end in jobs["survive"]:
        assert end.code == 1
        assert "--survive needs ranks of MPI: start them by" in end.err.splitlines()[-1]


ENDS_WITH = {
    "raises": (1, r"ArithmeticError: of the program"),
    "is refused": (1, r"\[rank 1\] parallel-sgd: error: x must be above 0 \(program.py:\d+\)"),
    "sys.exit": (3, r"$"),
    "is killed": (-9, r"$"),
    "os._exit": (4, r"$"),
    "ends early": (0, r"$"),
    "calls another": (1, r"\[rank 1\] parallel"),
    "stops": (-signal.SIGKILL, r"$"),
}

FAILED = r"rank 1 \(pid \d+\) has failed or was killed: found in \w+"
FINISHED = r"waits in sum_integers for rank 1, which has finished \(the program has ended there\)"
DIFFERENT = r"called different collectives, .*rank 1: allgather"
STOPPED = r"rank 1 \(pid \d+\) is stopped, by a signal or a debugger"
SILENT = "has received nothing from the worker on rank 1 for timeout_s=3 s"


@pytest.mark.parametrize(("how", "place"), ENDS)
def test_the_end_of_a_rank(jobs: Any, how: str, place: str) -> None:
    """All ranks end, soon and with an error, and the others say why; here rank 1 ends."""
    ends = jobs[how, place]
    code, said = ENDS_WITH[how]
    assert ends[1].code == code and re.search(said, ends[1].err), ends[1]
    first = min(end.seconds for end in ends)
    for end in (ends[0], ends[2]):
        assert end.code == 1
        assert end.seconds - first < 10 * patience()
    texts = {
        "sys.exit": FINISHED,
        "ends early": FINISHED,
        "calls another": DIFFERENT,
        "stops": STOPPED,
    }
    text = texts.get(how, FAILED)
    by = ends[0:3:2]
    if place == "server" and text is not FAILED:  # rank 2 serves; rank 0 sees its end
        text = SILENT if text == STOPPED else "the worker on rank 1 has ended without"
        by = ends[2:]
    if how == "calls another":  # the first to find it may have ended
        assert any(re.search(DIFFERENT, end.err) for end in ends)
        text = f"{DIFFERENT}|{FAILED}"
    for end in by:
        rank = ends.index(end)
        lines = [line for line in end.err.splitlines() if re.search(text, line)]
        assert lines and lines[0].startswith(f"[rank {rank}] "), end
