"""What every rank of `parallel-sgd run` executes: a script or module, as `python` would run it.

``python -m parallel_sgd.command_line.rank script.py [argument …]``, or ``-m module``. Unlike plain
`python`, an error on one rank ends the job on all of them: see `communication.entry_point`.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys

from ..communication.attendance import sign_on
from ..communication.entry_point import abort_on_error
from ..communication.launched import send_without_asking
from ..errors import UserError


def main(argv: list[str] | None = None) -> None:
    """Run the script or module named by the arguments as ``__main__``, with the rest as its own."""
    with abort_on_error():
        sign_on()
        send_without_asking()  # the script may start MPI by itself
        _run(sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):
                # Whole lines, as they are printed: the ranks share one terminal.
                stream.reconfigure(line_buffering=True, write_through=False)
    module = argv[:1] == ["-m"]
    sys.argv[:] = argv[1:] if module else argv
    if not sys.argv:
        raise UserError("the script to run must be given: there is none")
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    script = sys.argv[0]
    if not os.path.exists(script):
        raise UserError(f"script must exist on host {socket.gethostname()}: {script!r}")
    if not sys.flags.safe_path:  # python -m has put the working directory there
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
