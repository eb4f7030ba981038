"""Bound a wait during which no Python thread can run: MPI_Init."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from ..liveness import heartbeat
from ..liveness.abort import GRACE_S
from ..liveness.heartbeat import FILE, own
from ..liveness.rank_status import Status, status_file
from ..liveness.watchdog import message

#: Program of the process started by `kill_if_longer_than`. Its stdin is closed when the wait is
#: over. Ranks with a heartbeat outside such a wait are missing. The first waiting rank makes all
#: ranks write their stacks. The heartbeat module is loaded by its file, without the package.
_WATCHER = """
import os, select, signal, sys, time
pid, timeout_s, grace_s, message, lost, place, module, rank = sys.argv[1:]
if not select.select([0], [], [], float(timeout_s))[0]:
    try:
        print(message, file=sys.stderr, flush=True)
        if lost:
            open(lost, "w").close()
        if place:
            import importlib.util, pathlib
            found = importlib.util.spec_from_file_location("board", module)
            board = sys.modules["board"] = importlib.util.module_from_spec(found)
            found.loader.exec_module(board)
            lines = board.open_heartbeat_table(pathlib.Path(place)).heartbeats()
            late = [line for line in lines if not line.waits_since]
            if late:
                names = ", ".join(f"{line.rank} (pid {line.process})" for line in late)
                text = f"[rank {rank}] parallel_sgd: not arrived, on this host: rank {names}"
                print(text, file=sys.stderr, flush=True)
            waiting = [line.rank for line in lines if line.waits_since]
            if int(rank) == min(waiting, default=-1):
                for line in lines:
                    line.signal(board.SHOW_STACKS)
    except OSError:  # for example a full disk: no message is worth a hang
        pass
    finally:
        time.sleep(float(grace_s))  # further waiting ranks print their messages meanwhile
        os.kill(int(pid), signal.SIGKILL)
"""


@contextlib.contextmanager
def kill_if_longer_than(timeout_s: float, rank: int, name: str) -> Iterator[None]:
    """Kill this process if the body takes too long, even if no Python thread can run: MPI_Init.

    mpi4py holds Python's lock throughout MPI_Init, so a second process has to watch. A rank killed
    by a signal ends the job on Open MPI and on MPICH, also before MPI is initialized.

    Args:
        timeout_s: longest time, in seconds.
        rank: this rank, for the message.
        name: name of the wait, for the message.

    Local. Cost: starting one bare interpreter, some 10 ms in the background.
    """
    place, lost = status_file(FILE, of_rank=False), status_file(Status.LOST)
    facts = (os.getpid(), timeout_s, GRACE_S, message(timeout_s, rank, name), lost or "")
    table = place if place is not None and place.exists() else ""
    watcher = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _WATCHER,
            *map(str, (*facts, table, heartbeat.__file__, rank)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    now = time.monotonic()
    own.note(now, now, now, name)
    with watcher:
        try:
            yield
        finally:
            watcher.kill()
            own.note(time.monotonic(), 0.0, 0.0, "")
