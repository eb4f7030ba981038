"""Kernels that are ready before training begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..communication import Communicator
from ..communication.stderr import write_stderr
from ..kernels import prepare


def prepare_kernels(comm: Communicator, calls: Sequence[Callable[[], object]]) -> None:
    """Have the kernels ready that some calls need, before anything is measured or timed.

    Of what has to be compiled, as many ranks as there are cores begin with different kernels, and
    the rest wait; rank 0 says so on stderr.

    Args:
        calls: the same on all ranks, such as the `first_calls` of an algorithm.

    Local. Cost: seconds where kernels have to be compiled, and hundredths to load them.
    """

    def say(line: str) -> None:
        if comm.rank == 0:
            write_stderr(f"parallel-sgd: {line}")

    prepare(calls, comm.rank, say)
