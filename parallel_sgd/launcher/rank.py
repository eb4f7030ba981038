"""What every rank of `parallel-sgd run` executes: a script or module, as `python` would run it.

``python -m parallel_sgd.launcher.rank script.py [argument …]``, or ``-m module``. Unlike plain
`python`, an error on one rank ends the job on all of them: see `communication.entry_point`.
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
from ..errors import UserError
from ..validation import shown
from .gpus import VISIBLE, visible_gpus
from .hosts import decimal
from .interfaces import checked_interface, interfaces, on_this_host, variables
from .rank_logs import to_log


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script or module named by the arguments as ``__main__``, with the rest as its own."""
    import numpy  # noqa: F401  which the script needs: until `started` an interrupt is one line

    with abort_on_error():
        prepare()
        raise_eager_limit()  # the script may start MPI by itself
        _run(sys.argv[1:] if argv is None else argv)


def prepare() -> None:
    """Do what the environment asks of this rank, before MPI, CUDA or gloo are up.

    Where `parallel-sgd run` has started it, its standard input is empty: of an mpiexec some ranks
    have one of which no end ever comes.

    `LOG_DIR`: its output goes to files there. `GPUS_PER_RANK`: it sees only its own GPUs.
    `INTERFACE`: it talks to other hosts by that network. `PREEMPT_ON`: it catches those signals.

    Raises:
        UserError: what is asked cannot be done on this host.

    Local. Changes `os.environ`.
    """
    folder, gpus, interface = (os.environ.get(name) for name in (LOG_DIR, GPUS_PER_RANK, INTERFACE))
    try:
        if REQUESTED_RANKS in os.environ:
            _read_nothing()
        if folder:
            to_log(folder, launched_rank() or 0)
        listen()
    finally:  # so that it can say why it ends
        report_start()
    if gpus is not None:
        per_rank = decimal(gpus)
        if not per_rank:
            raise UserError(f"{GPUS_PER_RANK}={shown(gpus)} must be a whole number, at least 1")
        os.environ[VISIBLE] = visible_gpus(per_rank, _local_rank(), os.environ)
    if interface is not None:
        chosen = on_this_host(checked_interface(interface), interfaces())
        os.environ.update(variables(chosen))


def _read_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if nothing:
        os.close(nothing)


def _local_rank() -> int:
    local_rank = launched_local_rank()
    if local_rank is None and (launched_size() or 1) > 1:
        raise UserError(
            f"{GPUS_PER_RANK} needs a launcher that numbers the ranks of each host, and "
            f"{launcher_name()} does not"
        )
    return local_rank or 0


def _run(argv: Sequence[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):
                # Whole lines, as they are printed: the ranks share one terminal.
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
    if not sys.flags.safe_path:  # python -m has put the working directory there
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
