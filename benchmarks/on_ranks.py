"""Runs a benchmark's function on K ranks, through the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from parallel_sgd import Communicator, UserError
from parallel_sgd.command_line.cluster import EmulatedHosts
from parallel_sgd.communication.entry_point import abort_on_error

TIMEOUT_S = 900


def on_ranks(
    ranks: int,
    function: str,
    options: dict[str, Any],
    *,
    inside: Sequence[str] = (),
    run_options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Call a function with a communicator and options on K MPI ranks; return rank 0's result.

    Args:
        ranks: how many; started by `parallel-sgd run`, on this machine unless its options say more.
        function: a module of this package, whose `measure` is called, or "module:function".
        options: of JSON types.
        inside: a command that starts the command after it.
        run_options: of `parallel-sgd run`.
        environ: instead of this process's environment.
    Raises:
        UserError: the ranks ended with an error, printed above.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [*inside, sys.executable, "-m", "parallel_sgd", "run", "-n", str(ranks)]
        command += run_options
        command += ["-m", "benchmarks.on_ranks", function, json.dumps(options), str(result)]
        code = subprocess.run(command, env=environ, timeout=TIMEOUT_S, check=False).returncode
        if code != 0:
            raise UserError(f"{ranks} ranks of benchmarks.{function} ended with exit code {code}")
        return json.loads(result.read_text())


def on_hosts(
    hosts: EmulatedHosts,
    function: str,
    options: dict[str, Any],
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Call `on_ranks` with a rank on each slot of an emulated cluster.

    Args:
        environ: added to the environment.
    """
    return on_ranks(
        len(hosts.names) * hosts.slots,
        function,
        options,
        inside=hosts.inside,
        run_options=hosts.run_options,
        environ={**os.environ, **hosts.environment, **(environ or {})},
    )


def _main(function: str, options: str, result: str) -> None:
    module, _, name = function.partition(":")
    comm = Communicator.world()
    called = getattr(import_module(f"benchmarks.{module}"), name or "measure")
    measured = called(comm, **json.loads(options))
    if comm.rank == 0:
        Path(result).write_text(json.dumps(measured))


if __name__ == "__main__":
    with abort_on_error():
        _main(*sys.argv[1:])
