"""PyTorch's launcher, silent if ranks fail: `parallel-sgd run` has said why.

Takes the arguments of ``python -m torch.distributed.run``. For a failed rank torchrun prints some
forty lines: a traceback of its own, and the exit code of every rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Start the ranks on this host, wait for them, and return 1 if a rank has failed, else 0."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("agent.server.api", "multiprocessing.api"):  # the ends of processes
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        run.main(list(argv))
    except (ChildFailedError, SignalException):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
