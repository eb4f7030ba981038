"""Jobs of two ranks, one of which ends while the other trains on; no launcher ends the other.

Ranks are forked, so that PyTorch is imported once for all jobs. A forked rank ends as a program
does: its exception is printed by `sys.excepthook`, and its exit functions run.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401  DDP imports it: once, before the ranks are forked
import torch.distributed as dist
from ddp_models import mlp, trained, wrapped
from limits import patience
from ports import free_port

from parallel_sgd.torch import compress

TIMEOUT_S = 60.0  #: of all jobs


def ends_early(handle: Any) -> None:
    handle.close()
    dist.destroy_process_group()


def fails(handle: Any) -> None:
    raise ZeroDivisionError("a mistake of rank 1")


def leaves(handle: Any) -> None:
    sys.exit(3)


def is_killed(handle: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDINGS: dict[str, Callable[[Any], None]] = {
    "exception": fails,
    "sys.exit": leaves,
    "kill": is_killed,
    "normal end": ends_early,
}


def rank_program(end: Callable[[Any], None]) -> None:
    dist.init_process_group("gloo")
    ddp = wrapped(mlp)
    handle = compress(ddp, gradient_bits=1)
    trained(ddp, range(3))
    if dist.get_rank() == 1:
        end(handle)
        return
    print("trained", flush=True)
    trained(ddp, range(3, 1_000_000))


def run_rank(rank: int, port: int, output: Path, end: Callable[[Any], None]) -> NoReturn:
    """In a forked process."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    code = 0
    try:
        rank_program(end)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(folder: Path) -> None:
    ranks: dict[int, tuple[str, int]] = {}
    for name, end in ENDINGS.items():
        port = free_port()
        for rank in range(2):
            process = os.fork()
            if process == 0:
                run_rank(rank, port, folder / f"{name}.{rank}", end)
            ranks[process] = name, rank
    found: dict[str, dict[str, tuple[int, float]]] = {name: {} for name in ENDINGS}
    deadline = time.monotonic() + TIMEOUT_S * patience()
    while ranks and time.monotonic() < deadline:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            name, rank = ranks.pop(ended)
            found[name][str(rank)] = os.waitstatus_to_exitcode(status), time.monotonic()
        else:
            time.sleep(0.02)
    for process in ranks:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    (folder / "endings.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
