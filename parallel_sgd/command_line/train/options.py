"""The options of a training run: its own, and those of the algorithm and the optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from ...algorithms import ALGORITHMS, Algorithm
from ...argument_parser import Parser
from ...communication import TIMEOUT_S
from ...data import FORMATS, TASKS
from ...data.shares import checked_shares, read_shares
from ...errors import UserError
from ...optimizers import OPTIMIZERS
from ...options import BySamples, Whole, all_options
from ...training import AutoLearningRate, AutoMinibatchSize, NotFinitePolicy
from ...training.checkpoint.retention import KEEP
from ...training.consistency import EVERY
from ...training.session.options import FOLLOWS
from ...training.session.tracker import PROJECT
from ...training.session.tracking_services import SERVICES
from ...version import __version__
from ..options import add_option, add_options, check_of, reader

SIZES = BySamples(Whole(1))  #: of minibatches

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
    *,
    own_first: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with all options of a training run.

    The help shows only the options of this algorithm and this optimizer.

    Args:
        algorithm, optimizer: names.
        algorithms: the classes of all algorithms by name.
        own_first: show the options of the algorithm and the optimizer first in the help.
    Raises:
        UserError: an algorithm has options that cannot be options of the command line.
    """
    p = Parser(
        prog="train.py",
        usage="parallel-sgd run -n RANKS train.py [CONFIG.toml] [--OPTION VALUE ...]",
        description="Train a model on all ranks started by mpiexec.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--version", action="version", version=f"parallel_sgd {__version__}")
    p.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.toml",
        help="options from a file; options of the command line take precedence",
    )
    p.add_argument(
        "--print-config",
        action="store_true",
        help="print all options with their present values, as a file to begin with",
    )
    rate = f"(if neither lr is given: {DEFAULT_LR[optimizer]})"
    titles = ("method", f"--algorithm {algorithm}", f"--optimizer {optimizer} {rate}")
    groups = [p.add_argument_group(title) for title in titles] if own_first else []
    _add_data(p)
    _add_model(p)
    _add_run(p)
    _add_validation(p)
    _add_adjustments(p)
    _add_numbers(p)
    _add_output(p)
    _add_measuring(p)
    _add_saving(p)
    method, of_algorithm, of_optimizer = groups or map(p.add_argument_group, titles)
    add_choices(method)
    own = {action.dest for action in p._actions}
    of_optimizers = {option.name for kind in OPTIMIZERS.values() for option in all_options(kind)}
    add_options(of_algorithm, algorithms, algorithm, own | of_optimizers)
    add_options(of_optimizer, OPTIMIZERS, optimizer, own)
    return p


def add_choices(p: Any) -> None:
    """Add the options that choose the algorithm and the optimizer; `--help` depends on them."""
    for name, kinds, default in (
        ("algorithm", ALGORITHMS, "data-parallel"),
        ("optimizer", OPTIMIZERS, "sgd"),
    ):
        p.add_argument(
            f"--{name}",
            choices=kinds,
            default=default,
            help=f"(default: {default}); --{name} NAME --help shows its options",
        )


def _number(
    add: Callable[..., object], flag: str, default: float, metavar: str, meaning: str
) -> None:
    """Add an option with a number of the default's type."""
    text = f"{meaning} (default: {default:g})"
    add(flag, type=type(default), default=default, metavar=metavar, help=text)


def _add_data(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("data").add_argument
    add(
        "--data",
        default="digits",
        metavar="FILE",
        help="digits (scikit-learn's), library (the source of Python's standard library, byte by "
        f"byte), or a file or folder in one of the formats {', '.join(FORMATS)} (default: digits)",
    )
    add("--labels", metavar="FILE", help="the labels, if --data is a .npy or IDX file")
    add("--format", choices=(*FORMATS,), help="the format of --data, if its name does not show it")
    add(
        "--reader",
        nargs="+",
        metavar="NAME=VALUE",
        help="options of the format's reader, as in Python: size=[32,32] header=False "
        "streams={'x':Dense(6),'y':Sparse(3,one_hot=True)}",
    )
    for name, default in (("x", "all others"), ("y", "y, label or target")):
        add(
            f"--{name}",
            nargs="+",
            metavar="NAME",
            help=f"the columns of a table that are {name} (default: {default})",
        )
    add(
        "--task",
        choices=TASKS,
        help="the kind of targets to learn (default: classes if these are whole numbers [n], "
        "several labels if whole numbers [n, k], numbers if floats)",
    )
    add(
        "--classes",
        type=int,
        metavar="N",
        help="labels are from 0 to N - 1 (default: as many as the labels show)",
    )
    _number(
        add,
        "--test",
        0.2,
        "X",
        "fraction of the samples kept for testing, if the data have no part for testing",
    )
    _number(
        add,
        "--validation",
        0.0,
        "X",
        "fraction of the training samples kept to measure the model during training; 0: the test "
        "data are used",
    )
    add(
        "--standardize",
        action="store_true",
        help="give each feature mean 0 and standard deviation 1 over the training samples; the "
        "run's folder keeps the numbers for later runs (--resume, --initial-model)",
    )


def _add_model(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("model").add_argument
    add(
        "--model",
        metavar="mlp | linear | softmax | bytes | FILE.py:FUNCTION",
        help="bytes: a language model of the preceding bytes; FUNCTION is called with the shape of "
        "an input and the number of outputs, and returns a torch.nn.Module or a model of "
        "parallel_sgd.models (default: mlp, or for --data library bytes)",
    )
    add(
        "--initial-model",
        metavar="FOLDER",
        help="begin with the model of another run, of any algorithm: its folder, or a model.npz",
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
        help="the device of the model and its gradients (cuda needs CuPy)",
    )


def _shares(text: str) -> str:
    """Check the text of the ranks' shares, and return it."""
    try:
        checked_shares(read_shares(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _add_run(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("run").add_argument
    add("--epochs", type=int, default=30, metavar="N", help="(default: 30)")
    add(
        "--minibatch-size",
        type=reader("minibatch_size", SIZES),
        default=64,
        metavar="N | S:N,...",
        help="samples of all ranks together in a minibatch, or sizes with the sample counts from "
        "which they hold: 0:64,100000:256 (default: 64)",
    )
    add(
        "--rate-follows",
        choices=FOLLOWS,
        help="how the learning rate follows the minibatch size (default: --lr stays, "
        "--lr-per-sample is linear)",
    )
    add(
        "--microbatch-size",
        type=int,
        metavar="N",
        help="samples computed by a rank at a time; the gradients are added up (default: the "
        "rank's whole part of a minibatch)",
    )
    add(
        "--shares",
        type=_shares,
        metavar="measured | N,N,...",
        help="each rank's share of a minibatch: in proportion to its measured speed, or numbers of "
        "which only the ratios count (default: equal shares)",
    )
    add(
        "--distributed-after-epochs",
        type=int,
        metavar="N",
        help="--distributed-after, in epochs: until then every rank trains alone on all samples",
    )
    _number(add, "--seed", 0, "N", "seed of the split, the model and the order")
    add(
        "--compare-serial",
        action="store_true",
        help="afterwards train on rank 0 alone, in full precision, and show both",
    )
    add(
        "--timeout-s",
        type=float,
        metavar="S",
        help="longest wait for other ranks, in seconds (default: that of `parallel-sgd run "
        f"--wait-timeout-s`, or {TIMEOUT_S:g})",
    )
    add(
        "--cuda-aware",
        action="store_true",
        help="pass GPU arrays to MPI directly: only if your MPI is CUDA-aware",
    )


def _add_validation(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("cross-validation").add_argument
    add(
        "--validate-every",
        type=int,
        metavar="N",
        help="samples of all ranks between two measurements (default: an epoch)",
    )
    add(
        "--criterion",
        default="loss",
        metavar="METRIC",
        help="the metric that chooses the best model: loss, accuracy, r2, f1 ... (default: loss)",
    )
    add(
        "--patience",
        type=int,
        metavar="N",
        help="end training after N measurements without a new best model (default: never)",
    )
    _number(
        add, "--min-improvement", 0.0, "X", "a model must be better by this much to be the new best"
    )
    add("--restore-best", action="store_true", help="end with the best model, not the last")


def _add_adjustments(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("adjust minibatch size and learning rate (CNTK's AutoAdjust)")
    for kind, flag, does in (
        (AutoMinibatchSize, "--auto-minibatch-size", "try larger minibatches now and then"),
        (AutoLearningRate, "--auto-learning-rate", "lower or raise the rate by the criterion"),
    ):
        group.add_argument(flag, action="store_true", help=does)
        for option in all_options(kind):
            add_option(group, option, check_of(option, kind), shown=True)


def _add_numbers(p: argparse.ArgumentParser) -> None:
    group = p.add_argument_group("numbers that are not finite, ranks that differ")
    for option in all_options(NotFinitePolicy):
        add_option(group, option, check_of(option, NotFinitePolicy), shown=True)
    every = "steps between two comparisons of the ranks' models and momenta; 0: never"
    _number(group.add_argument, "--compare-every", EVERY, "N", every)


def _add_output(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("what is written").add_argument
    add("--output", metavar="FOLDER", help="new folder for the results (default: runs/<time>)")
    add(
        "--progress-every",
        type=int,
        metavar="N",
        help="samples of all ranks between two lines of metrics (default: an epoch)",
    )
    add("--no-plot", action="store_true", help="do not draw the loss curve")
    add("--no-progress-bar", action="store_true", help="do not show a progress bar")
    add("--tensorboard", action="store_true", help="also write metrics for TensorBoard")
    add(
        "--tracker",
        choices=(*SERVICES,),
        help="also log metrics and options as a run of Weights & Biases or MLflow, which read "
        "their own variables (WANDB_MODE, MLFLOW_TRACKING_URI ...); a resumed run continues there",
    )
    add(
        "--project",
        metavar="NAME",
        help=f"with --tracker: the project, or MLflow's experiment (default: {PROJECT})",
    )


def _add_measuring(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("timing").add_argument
    add(
        "--trace",
        metavar="FILE",
        help="write a timeline of each rank and thread (compute, encode, wire, decode, wait ...), "
        "all on one clock: a JSON file for https://ui.perfetto.dev or chrome://tracing. Also "
        "written if training ends with an error of all ranks, except with --algorithm async",
    )
    add(
        "--sync-perf-stats",
        type=int,
        default=0,
        metavar="N",
        help="after every N synchronizations of all ranks print samples and bytes a second, and "
        "the time of compute, aggregation and update for each (default: 0, never)",
    )


def _add_saving(p: argparse.ArgumentParser) -> None:
    add = p.add_argument_group("checkpoints").add_argument
    add(
        "--checkpoint-every",
        type=int,
        default=0,
        metavar="N",
        help="save all state each time all ranks together have seen N more samples, after an epoch "
        "with the lowest test loss so far, and at the end (default: 0, never)",
    )
    add(
        "--checkpoint-every-s",
        type=float,
        metavar="S",
        help="save all state also about every S seconds",
    )
    latest = "number of newest checkpoints to keep, beside the one of the lowest test loss"
    _number(add, "--keep", KEEP, "N", latest)
    add(
        "--resume",
        metavar="FOLDER",
        help="resume from the newest checkpoint in the folder of a run, or from the given "
        "checkpoint. Options not given are taken from that run (its config.toml); learning rate, "
        "epochs, the numbers of ranks and of servers may change. Without --output the run goes on "
        "in its own folder, and its later checkpoints are renamed (.aside); a run that ended "
        "before its first checkpoint begins anew",
    )
