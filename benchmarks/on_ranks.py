"""Runs a benchmark's function on K ranks, through the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from parallel_sgd import Communicator, UserError
from parallel_sgd.command_line.cluster import emulated_hosts
from parallel_sgd.communication.entry_point import abort_on_error
from parallel_sgd.communication.mpi.init_timeout import kill_if_longer_than
from parallel_sgd.launcher.run import THREAD_VARIABLES

TIMEOUT_S = 4 * 3600.0  #: of a function; most waits have shorter limits of their own
ONE_THREAD = dict.fromkeys(THREAD_VARIABLES, "1")  #: for each rank, even where it has more cores


def on_ranks(
    ranks: int,
    function: str,
    options: dict[str, Any],
    *,
    inside: Sequence[str] = (),
    run_options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Call a function with a communicator and options on K MPI ranks; return rank 0's result.

    Args:
        ranks: how many; started by `parallel-sgd run`, on this machine unless its options say more.
        function: a module of this package, whose `measure` is called, or "module:function".
        options: of JSON types, with infinity.
        inside: a command that starts the command after it.
        run_options: of `parallel-sgd run`.
        environ: added to this process's environment.
        timeout_s: of the function.
    Raises:
        UserError: the ranks ended with an error, printed above.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [*inside, sys.executable, "-m", "parallel_sgd", "run", "-n", str(ranks)]
        command += [*run_options, "-m", "benchmarks.on_ranks", function, json.dumps(options)]
        command += [str(timeout_s), str(result)]
        env = {**os.environ, **(environ or {})}
        code = subprocess.run(command, env=env, check=False).returncode
        if code != 0:
            raise UserError(f"{ranks} ranks of benchmarks.{function} ended with exit code {code}")
        return json.loads(result.read_text())


def on_hosts(
    count: int,
    rate: float,
    function: str,
    options: dict[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Call `on_ranks` with a rank on each of `count` emulated hosts, on links of `rate` bits/s."""
    with emulated_hosts(count, rate) as hosts:
        return on_ranks(
            len(hosts.names) * hosts.slots,
            function,
            options,
            inside=hosts.inside,
            run_options=hosts.run_options,
            environ={**hosts.environment, **(environ or {})},
            timeout_s=timeout_s,
        )


@contextmanager
def process_group(comm: Communicator, wanted: bool = True) -> Iterator[None]:
    """Open PyTorch's process group over gloo for a `with` block, if wanted; one thread a rank."""
    if wanted:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of hosts without a name
        import torch

        from parallel_sgd.torch import init_process_group

        torch.set_num_threads(1)
        init_process_group(comm)
    yield
    if wanted:
        torch.distributed.destroy_process_group()


def _main(function: str, options: str, timeout_s: str, result: str) -> None:
    module, _, name = function.partition(":")
    comm = Communicator.world()
    called = getattr(import_module(f"benchmarks.{module}"), name or "measure")
    with kill_if_longer_than(float(timeout_s), comm.rank, f"benchmarks.{function}"):
        measured = called(comm, **json.loads(options))
    if comm.rank == 0:
        Path(result).write_text(json.dumps(measured))


if __name__ == "__main__":
    with abort_on_error():
        _main(*sys.argv[1:])
