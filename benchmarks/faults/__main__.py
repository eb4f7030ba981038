"""The programs of a job's ranks: `parallel-sgd run -n 4 -m benchmarks.faults PROGRAM SETTINGS`."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable

from . import child, endless
from .job import STACKS

PROGRAMS: dict[str, Callable[..., None]] = {"child": child.main, "endless": endless.main}

if __name__ == "__main__":
    faulthandler.register(STACKS, all_threads=True)
    PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))
