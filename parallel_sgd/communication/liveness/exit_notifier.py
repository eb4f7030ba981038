"""Tells of a rank that dies while no other one survives it, where the launcher cannot see it: it is
on another host. A small process beside the rank; MPI does not end the others' wait in MPI_Init.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Its stdin ends with the rank.
_MOURNER = """
import sys
sys.stdin.read()
try:
    open(sys.argv[1], "w").close()
except OSError:  # the job is over, and the folder not there any more
    pass
"""


class ExitNotifier:
    """
    Args:
        place: a file that is made when this process ends.

    Local. Cost: a bare interpreter, some 10 ms in the background.
    """

    def __init__(self, place: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _MOURNER, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def leave(self) -> None:
        """From now on this process's end is nobody's loss."""
        self._process.kill()
        self._process.communicate()
