"""Preparation of kernels before training begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..communication import Communicator
from ..communication.stderr import write_stderr
from ..kernels import prepare


def prepare_kernels(comm: Communicator, calls: Sequence[Callable[[], object]]) -> None:
    """Load, and if necessary compile, the kernels for some calls, before anything is measured or
    timed.

    With a compilation due, each of as many ranks as there are cores begins with a different kernel,
    and the remaining ranks wait; rank 0 reports this on stderr.

    Args:
        calls: the same on all ranks, such as the `first_calls` of an algorithm.

    Local. Cost: seconds to compile kernels, hundredths of a second to load them.
    """

    def say(line: str) -> None:
        if comm.rank == 0:
            write_stderr(f"parallel-sgd: {line}")

    prepare(calls, comm.rank, say)
