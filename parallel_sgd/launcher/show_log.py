"""Copy what is written to files onto a terminal, until whoever writes is gone.

``python -I -S show_log.py ENDS FILE TERMINAL [FILE TERMINAL …]``, by numbers of descriptors: a
program of its own, which imports nothing of this package, so that it starts at once (`logs`).
"""

import os
import select
import signal
import sys

EVERY_MS = 50


def copy(file: int, terminal: int) -> bool:
    """Copy what is new; whether that can go on."""
    while chunk := os.read(file, 1 << 16):
        while chunk:
            try:
                chunk = chunk[os.write(terminal, chunk) :]
            except BlockingIOError:  # a terminal that others have made so
                select.select([], [terminal], [], 1.0)
            except OSError:  # nobody looks any more
                return False
    return True


def main(ends: int, *pairs: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    over = select.poll()
    over.register(ends, 0)
    shown = list(zip(pairs[::2], pairs[1::2], strict=True))
    gone = False
    while shown and not gone:
        gone = bool(over.poll(EVERY_MS))
        shown = [pair for pair in shown if copy(*pair)]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
