"""Run the command named by the first argument: `parallel-sgd`. Import only that command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ..argument_parser import Parser
from ..communication.entry_point import abort_on_error
from ..communication.liveness.abort import INTERRUPTED, discard_stdout, user_message
from ..starting import started
from ..version import __version__

#: The module of each command, relative to this package, and the command's purpose. The module's
#: `main(argv)` returns the exit code.
COMMANDS = {
    "run": ("..launcher.run", "start a Python script on N ranks, by mpiexec or torchrun"),
    "train": (".train", "train a model on data, on one rank or many"),
    "predict": (".predict", "write the predictions of a run's model, as CSV"),
    "compare": (".compare", "compare runs: losses, speed, bytes, and time to a loss"),
    "simulate": (".simulate", "train on N ranks that are threads of one process, without MPI"),
    "plan": (".plan", "estimate the cost of every algorithm on a cluster, and recommend one"),
    "cluster": (".cluster.command", "run a command on emulated hosts (root)"),
    "doctor": (".doctor.command", "check a cluster, and say how to mend its problems"),
    "info": (".info", "show MPI, mpiexec, cores and GPUs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Print a user's error as a single line; on ranks, end the job.

    Returns:
        The exit code: 0, a command's own, or 2 for wrong arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or argv[0] not in COMMANDS:
            _parser().parse_args(argv or ["--help"])
            return 0
        command, arguments = argv[0], list(argv[1:])
        module = import_module(COMMANDS[command][0], __package__)
        started()  # until here an interrupt ends the program with a single line
        if command == "train":  # the only command that runs on ranks
            with abort_on_error():
                sys.exit(module.main(arguments))
        code = int(module.main(arguments) or 0)
        sys.stdout.flush()  # report an error below, not while Python exits
        return code
    except BrokenPipeError:  # the reader has left, as in `parallel-sgd info | head -1`
        discard_stdout()
        return 1
    except (Exception, KeyboardInterrupt) as error:
        line = user_message(error)
        if line is None:
            raise
        print(line, file=sys.stderr)
        discard_stdout()
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<10}{purpose}" for name, (_, purpose) in COMMANDS.items())
    parser = Parser(
        prog="parallel-sgd",
        usage="parallel-sgd COMMAND [argument ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Parallel stochastic gradient descent: data-parallel training on many ranks.",
        epilog=f"commands:\n{commands}\n\n`parallel-sgd COMMAND --help` shows the options of a "
        "command.",
    )
    parser.add_argument("--version", action="version", version=f"parallel-sgd {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser
