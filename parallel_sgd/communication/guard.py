"""What ends a wait in which no thread of Python runs: MPI_Init."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from .abort import GRACE_S
from .attendance import LOST, place_of
from .board import FILE, LINE_BYTES, LINE_FORMAT, SHOW_STACKS, own
from .watchdog import message

#: The process of `ended_if_longer_than`: its stdin is closed when the wait is over. Ranks that have
#: come to the board, and are not in a wait like this, are missing; the first that waits has all of
#: them show their stacks.
_GUARD = """
import os, select, signal, struct, sys, time
pid, timeout_s, grace_s, message, lost, board, form, length, show, rank = sys.argv[1:]
if not select.select([0], [], [], float(timeout_s))[0]:
    try:
        print(message, file=sys.stderr, flush=True)
        if lost:
            open(lost, "w").close()
        if board:
            length, memory = int(length), open(board, "rb").read()
            lines = [struct.unpack_from(form, memory, k) for k in range(0, len(memory), length)]
            there = {k: line for k, line in enumerate(lines) if line[0]}
            late = [k for k, line in there.items() if not line[4]]
            if late:
                names = ", ".join(f"{k} (pid {there[k][0]})" for k in late)
                text = f"[rank {rank}] parallel_sgd: not there, on this host: rank {names}"
                print(text, file=sys.stderr, flush=True)
            if int(show) and int(rank) == min(there.keys() - set(late), default=-1):
                for line in there.values():
                    try:
                        os.kill(line[0], int(show))
                    except OSError:
                        pass
    except OSError:  # a full disk, say: what is to be said is worth no hang
        pass
    time.sleep(float(grace_s))  # for the others that wait too, to say so
    os.kill(int(pid), signal.SIGKILL)
"""


@contextlib.contextmanager
def ended_if_longer_than(timeout_s: float, rank: int, name: str) -> Iterator[None]:
    """Kill this process if the body takes too long, even where no thread could: MPI_Init.

    mpi4py holds Python's lock throughout MPI_Init, so another process has to watch. A rank that
    dies of a signal ends the job on Open MPI and on MPICH, also before MPI is up.

    Local. Cost: starting one bare interpreter, some 10 ms in the background.
    """
    board, lost = place_of(FILE, of_rank=False), place_of(LOST)
    facts = (os.getpid(), timeout_s, GRACE_S, message(timeout_s, rank, name), lost or "")
    seen = board if board is not None and board.exists() else ""
    others = (seen, LINE_FORMAT, LINE_BYTES, SHOW_STACKS, rank)
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, *map(str, (*facts, *others))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    now = time.monotonic()
    own.note(now, now, now, name)
    with guard:
        try:
            yield
        finally:
            guard.kill()
            own.note(time.monotonic(), 0.0, 0.0, "")
