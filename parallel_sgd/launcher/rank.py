"""Run a script or module as a rank of `parallel-sgd run`, in the way of `python`.

``python -m parallel_sgd.launcher.rank script.py [argument …]``, or ``-m module``. In contrast to
plain `python`, an error on a single rank ends the job on all ranks: see
`communication.entry_point`.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from collections.abc import Sequence

from ..communication.entry_point import abort_on_error
from ..communication.job_environment import (
    GPUS_PER_RANK,
    INTERFACE,
    LOG_DIR,
    REQUESTED_RANKS,
    launched_local_rank,
    launched_rank,
    launched_size,
    launcher_name,
    raise_eager_limit,
)
from ..communication.liveness.preemption import listen
from ..communication.liveness.rank_status import report_start
from ..communication.network_interfaces import interfaces
from ..errors import UserError
from ..validation import shown
from .host_resources import (
    VISIBLE,
    checked_interface,
    interface_variables,
    local_interface,
    visible_gpus,
)
from .hosts import decimal
from .rank_logs import redirect_output


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script or module named by the arguments as ``__main__``, with the rest as its own."""
    import numpy  # noqa: F401  for the script; until `started` an interrupt is a single line

    with abort_on_error():
        prepare()
        raise_eager_limit()  # before the script starts MPI
        _run_program(sys.argv[1:] if argv is None else argv)


def prepare() -> None:
    """Apply the launcher's environment variables to this rank, before MPI, CUDA or gloo start.

    If `parallel-sgd run` has started the rank, its standard input is empty: with an mpiexec some
    ranks have an input that never ends.

    `LOG_DIR`: send the output to files there. `GPUS_PER_RANK`: make only the rank's own GPUs
    visible. `INTERFACE`: use that network to other hosts. `PREEMPT_ON`: catch those signals.

    Raises:
        UserError: this host cannot fulfil a variable.

    Local. Changes `os.environ`.
    """
    folder, gpus, interface = (os.environ.get(name) for name in (LOG_DIR, GPUS_PER_RANK, INTERFACE))
    try:
        if REQUESTED_RANKS in os.environ:
            _empty_stdin()
        if folder:
            redirect_output(folder, launched_rank() or 0)
        listen()
    finally:  # also on an error, so that the rank can report it
        report_start()
    if gpus is not None:
        per_rank = decimal(gpus)
        if not per_rank:
            raise UserError(f"{GPUS_PER_RANK}={shown(gpus)} must be a whole number, at least 1")
        os.environ[VISIBLE] = visible_gpus(per_rank, _local_rank(), os.environ)
    if interface is not None:
        chosen = local_interface(checked_interface(interface), interfaces())
        os.environ.update(interface_variables(chosen))


def _empty_stdin() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null:
        os.close(null)


def _local_rank() -> int:
    local_rank = launched_local_rank()
    if local_rank is None and (launched_size() or 1) > 1:
        raise UserError(
            f"{GPUS_PER_RANK} needs a launcher that numbers the ranks of each host, and "
            f"{launcher_name()} does not"
        )
    return local_rank or 0


def _run_program(argv: Sequence[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):
                # Write whole lines, at once: the ranks share a terminal.
                stream.reconfigure(line_buffering=True, write_through=False)
    module = list(argv[:1]) == ["-m"]
    sys.argv[:] = argv[1:] if module else list(argv)
    if not sys.argv:
        raise UserError("the script to run must be given: there is none")
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    script = sys.argv[0]
    if not os.path.exists(script):
        raise UserError(f"script must exist on host {socket.gethostname()}: {script!r}")
    if not sys.flags.safe_path:  # python -m has set it to the working directory
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
