"""The options of a training run: its own, and those of the algorithm and the optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from ..algorithms import ALGORITHMS, Algorithm
from ..communication import TIMEOUT_S
from ..optimizers import OPTIMIZERS
from ..options import all_options
from ..version import __version__
from .options import add_options
from .parser import Parser

KEEP = 3  #: checkpoints

DEFAULT_LR = {"sgd": 0.3, "momentum": 0.03, "nesterov": 0.03, "adam": 0.001, "adagrad": 0.03}

EXAMPLES = """\
examples:
  parallel-sgd run -n 4 train.py --gradient-bits 1 --compare-serial
  mpiexec -hostfile hosts python train.py --optimizer momentum --lr 0:0.1,50000:0.01
  mpiexec -n 4 python train.py --lr cosine:0:0.3,40000:0.001
  parallel-sgd run -n 5 --servers 1 train.py --algorithm async --sync-period 64 --lr 0.1
  parallel-sgd run -n 4 train.py --checkpoint-every 10000 --output run
  parallel-sgd run -n 2 train.py --checkpoint-every 10000 --resume run
  mpiexec -n 8 python train.py --data train.npz --hidden 512 512 --gradient-bits 0:32,20000:1
"""


def parser(
    algorithm: str = "data-parallel",
    optimizer: str = "sgd",
    algorithms: Mapping[str, type[Algorithm[Any]]] = ALGORITHMS,
) -> argparse.ArgumentParser:
    """All options of a training run, and of them shown those of this algorithm and optimizer.

    Raises:
        UserError: an algorithm has options that cannot be options of the command line.
    """
    p = Parser(
        prog="train.py",
        description="Train a softmax classifier on all ranks that mpiexec started.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--version", action="version", version=f"parallel_sgd {__version__}")
    _add_data(p)
    _add_model(p)
    _add_run(p)
    _add_measuring(p)
    _add_saving(p)
    add_choices(p.add_argument_group("method"))
    own = {action.dest for action in p._actions}
    of_optimizers = {option.name for kind in OPTIMIZERS.values() for option in all_options(kind)}
    add_options(p, f"--algorithm {algorithm}", algorithms, algorithm, own | of_optimizers)
    rate = f"(where neither lr is given: {DEFAULT_LR[optimizer]})"
    add_options(p, f"--optimizer {optimizer} {rate}", OPTIMIZERS, optimizer, own)
    return p


def add_choices(p: Any) -> None:
    """Of the algorithm and the optimizer; `--help` shows the options of those that are chosen."""
    for name, kinds, usual in (
        ("algorithm", ALGORITHMS, "data-parallel"),
        ("optimizer", OPTIMIZERS, "sgd"),
    ):
        p.add_argument(
            f"--{name}",
            choices=kinds,
            default=usual,
            help=f"(default: {usual}); --{name} NAME --help shows its options",
        )


def _number(
    add: Callable[..., object], flag: str, default: float, metavar: str, meaning: str
) -> None:
    """Add an option that is a number of its default's type."""
    text = f"{meaning} (default: {default:g})"
    add(flag, type=type(default), default=default, metavar=metavar, help=text)


def _add_data(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("data").add_argument
    add(
        "--data",
        default="digits",
        metavar="FILE",
        help="digits (scikit-learn's), library (the source of Python's standard library, byte by "
        "byte), a .npz with arrays x and y, a .npy, or an IDX file (default: digits)",
    )
    add("--labels", metavar="FILE", help="the labels, where --data is a .npy or IDX file")
    add(
        "--classes",
        type=int,
        metavar="N",
        help="labels are from 0 to N - 1 (default: as many as the labels show)",
    )
    _number(add, "--test", 0.2, "X", "fraction of the samples that is kept for testing")


def _add_model(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("model").add_argument
    add(
        "--model",
        choices=("mlp", "softmax", "bytes"),
        help="bytes: a language model of the bytes before (default: mlp, or for --data library "
        "bytes)",
    )
    add(
        "--hidden",
        type=int,
        nargs="+",
        metavar="N",
        help="units of each hidden layer of mlp or bytes (default: 128)",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the model and its gradients live (cuda needs CuPy)",
    )


def _add_run(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("run").add_argument
    add("--epochs", type=int, default=30, metavar="N", help="(default: 30)")
    _number(add, "--minibatch-size", 64, "N", "samples of all ranks together in a minibatch")
    _number(add, "--seed", 0, "N", "of split, model and order")
    add("--output", metavar="FOLDER", help="new folder for the results (default: runs/<time>)")
    add("--no-plot", action="store_true", help="do not draw the loss curve")
    add(
        "--compare-serial",
        action="store_true",
        help="afterwards train on rank 0 alone, in full precision, and show both",
    )
    _number(add, "--timeout-s", TIMEOUT_S, "S", "longest wait for other ranks, in seconds")
    add(
        "--cuda-aware",
        action="store_true",
        help="pass GPU arrays to MPI directly: only where your MPI is CUDA-aware",
    )


def _add_measuring(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("where the time goes").add_argument
    add(
        "--trace",
        metavar="FILE",
        help="write what each rank and thread did when (compute, encode, wire, decode, wait ...), "
        "all on one clock: a JSON file for https://ui.perfetto.dev or chrome://tracing. Also where "
        "training ends with an error of all ranks, but not with --algorithm async",
    )
    add(
        "--sync-perf-stats",
        type=int,
        default=0,
        metavar="N",
        help="after every N synchronizations of all ranks print samples and bytes a second, and "
        "how long compute, aggregation and update took for each (default: 0, never)",
    )


def _add_saving(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("checkpoints").add_argument
    add(
        "--checkpoint-every",
        type=int,
        default=0,
        metavar="N",
        help="save all state whenever all ranks have seen so many more samples, where an epoch's "
        "test loss is the lowest so far, and at the end (default: 0, never)",
    )
    latest = "how many of the latest to keep, beside the one of the lowest test loss"
    _number(add, "--keep", KEEP, "N", latest)
    add(
        "--resume",
        metavar="FOLDER",
        help="go on from the newest checkpoint in the folder of a run, or from the one given. Give "
        "the other options as before; learning rate, epochs, the numbers of ranks and of servers "
        "may change. Without --output the run goes on in its own folder, where checkpoints after "
        "that one are renamed (.aside)",
    )
