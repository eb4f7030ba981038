"""Write each rank's output to files of its own: `parallel-sgd run --log-dir FOLDER`.

A rank's stdout and stderr *are* its files. So all written text is kept, however the rank ends, and
whichever launcher started it (either mpiexec, or srun). A separate process copies the text for the
terminal.
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

_VIEWER = Path(__file__).with_name("show_log.py")

_viewers: list[subprocess.Popen[bytes]] = []  # kept until this process ends


def redirect_output(folder: str, rank: int) -> None:
    """Send all further output of this process to ``rank-k.out`` and ``rank-k.err``, appending.

    The terminal still shows all output of rank 0, and the errors of every rank; also if the disk of
    the files is full.

    Args:
        folder: the folder of the files; made if missing.
        rank: the rank k.

    Raises:
        UserError: the files cannot be written.

    Local. Cost: a small process that ends with this process.
    """
    shown, logs = [], []
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
        logs.append((log, number))
    set_stderr_fallback(os.dup(2))
    end_pipe, write_end = os.pipe()  # the pipe closes when this process ends
    command = [sys.executable, "-I", "-S", str(_VIEWER), *map(str, (end_pipe, *shown))]
    _viewers.append(
        subprocess.Popen(
            command,
            pass_fds=(end_pipe, *shown),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this process's group does not end the viewer
        )
    )
    close_in_children(write_end)
    for log, number in logs:
        os.dup2(log, number)
        os.close(log)
    for descriptor in (end_pipe, *shown):
        os.close(descriptor)
