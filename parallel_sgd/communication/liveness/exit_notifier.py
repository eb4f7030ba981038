"""Report the exit of a rank on a remote host before recovery is possible.

The launcher cannot see processes of remote hosts, and MPI does not end the wait of the remaining
ranks in MPI_Init. So a small process beside the rank makes a file when the rank exits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Program of the notifier. Its stdin is closed when the rank exits.
_NOTIFIER = """
import sys
sys.stdin.read()
try:
    open(sys.argv[1], "w").close()
except OSError:  # the job is over, and the folder not there any more
    pass
"""


class ExitNotifier:
    """Makes a file when this process exits.

    Args:
        place: path of the file.

    Local. Cost: a bare interpreter, some 10 ms in the background.
    """

    def __init__(self, place: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _NOTIFIER, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        """Stop the notifier: from now on the exit of this process needs no report."""
        self._process.kill()
        # bounded: it has been sent SIGKILL
        self._process.communicate()
