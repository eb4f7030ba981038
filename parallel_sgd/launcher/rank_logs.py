"""`parallel-sgd run --log-dir FOLDER`: what each rank prints goes to files of its own.

A rank's stdout and stderr *are* its files: what it has written is there, however it ends, and
whoever starts it (either mpiexec, srun). A process beside it shows on the terminal what is to be
seen there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..communication.liveness.rank_process import close_in_children
from ..communication.stderr import set_stderr_fallback
from ..errors import UserError
from ..files import opened_to_append
from ..validation import line_of

_SHOW = Path(__file__).with_name("show_log.py")

_showing: list[subprocess.Popen[bytes]] = []  # for as long as this process lives


def to_log(folder: str, rank: int) -> None:
    """From now on all that this process writes goes to ``rank-k.out`` and ``rank-k.err``, behind
    what is there.

    The terminal goes on showing both of rank 0, and the errors of every rank; also where the disk
    of the files is full.

    Raises:
        UserError: the files cannot be written.

    Local. Cost: a small process beside this one, which ends with it.
    """
    shown, kept = [], []
    for stream, number, end in ((sys.stdout, 1, "out"), (sys.stderr, 2, "err")):
        path = Path(folder, f"rank-{rank}.{end}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = opened_to_append(path)
        except OSError as error:
            raise UserError(
                f"log_dir={folder!r} must be a folder in which files can be written: "
                f"{line_of(error)}"
            ) from None
        if stream is not None:
            stream.flush()
        if end == "err" or rank == 0:
            reads, terminal = os.open(path, os.O_RDONLY | os.O_NOFOLLOW), os.dup(number)
            os.lseek(reads, 0, os.SEEK_END)
            shown += [reads, terminal]
        kept.append((log, number))
    set_stderr_fallback(os.dup(2))
    ends, lives = os.pipe()  # at its end this process is gone
    command = [sys.executable, "-I", "-S", str(_SHOW), *map(str, (ends, *shown))]
    _showing.append(
        subprocess.Popen(
            command,
            pass_fds=(ends, *shown),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # what ends this process's group does not end that one
        )
    )
    close_in_children(lives)
    for log, number in kept:
        os.dup2(log, number)
        os.close(log)
    for descriptor in (ends, *shown):
        os.close(descriptor)
