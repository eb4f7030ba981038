"""Copy new text in log files to a terminal until the writer exits.

``python -I -S show_log.py ENDS FILE TERMINAL [FILE TERMINAL …]``, with numbers of descriptors. A
separate program without imports from this package, so that it starts at once (see `rank_logs`).
"""

import os
import select
import signal
import sys

POLL_MS = 50


def copy(file: int, terminal: int) -> bool:
    """Copy new text. Return False if the terminal is gone."""
    while chunk := os.read(file, 1 << 16):
        while chunk:
            try:
                chunk = chunk[os.write(terminal, chunk) :]
            except BlockingIOError:  # the terminal was made non-blocking by another program
                select.select([], [terminal], [], 1.0)
            except OSError:  # the terminal is gone
                return False
    return True


def main(end_pipe: int, *pairs: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    poller = select.poll()
    poller.register(end_pipe, 0)
    shown = list(zip(pairs[::2], pairs[1::2], strict=True))
    writer_gone = False
    while shown and not writer_gone:
        writer_gone = bool(poller.poll(POLL_MS))
        shown = [pair for pair in shown if copy(*pair)]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
