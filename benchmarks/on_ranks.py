"""Runs a benchmark's function on K ranks, through the project's own launcher."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from parallel_sgd import Communicator, UserError
from parallel_sgd.communication.abort import abort_on_error

TIMEOUT_S = 900


def on_ranks(ranks: int, module: str, options: dict[str, Any]) -> Any:
    """Call ``module.measure(comm, **options)`` on K MPI ranks; what rank 0 returns.

    Args:
        ranks: how many; started on this machine by `parallel-sgd run`.
        module: a module of this package, by name.
        options: of JSON types.
    Raises:
        UserError: the ranks ended with an error, which they have printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "parallel_sgd", "run", "-n", str(ranks)]
        command += ["-m", "benchmarks.on_ranks", module, json.dumps(options), str(result)]
        code = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
        if code != 0:
            raise UserError(f"{ranks} ranks of benchmarks.{module} ended with exit code {code}")
        return json.loads(result.read_text())


def _main(module: str, options: str, result: str) -> None:
    from importlib import import_module

    comm = Communicator.world()
    found = import_module(f"benchmarks.{module}").measure(comm, **json.loads(options))
    if comm.rank == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    with abort_on_error():
        _main(*sys.argv[1:])
