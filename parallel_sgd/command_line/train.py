"""`parallel-sgd train`, and what train.py runs: train a classifier on data, on all ranks."""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS, Algorithm, BlockPeriod, OuterStep
from ..communication import TIMEOUT_S, Communicator, checked_timeout
from ..communication.entry_point import abort_on_error
from ..communication.launched import requested_servers
from ..data import DIGITS_CLASSES, Dataset, count_classes, digits, flattened, library_source, load
from ..errors import UserError
from ..models import MLP, ByteLanguageModel, Classifier, SoftmaxRegression, use_gpu
from ..optimizers import OPTIMIZERS, Optimizer
from ..options import all_options, values_of
from ..parameter_server import ParameterServers
from ..training import CHECKPOINTS, RunFolder, Session, require_matplotlib
from ..validation import checked_path, require_use, shown
from ..version import __version__
from .measuring import add_measuring_options
from .options import add_options, build, describe
from .parser import Parser
from .reporting import blocks, finish, print_choices, print_progress, ranks_in_words
from .saving import KEEP, add_saving_options, resumed_run

#: Data that need no file: the number of classes, and who reads them.
BUNDLED: dict[str, tuple[int, Callable[..., tuple[Dataset, Dataset]]]] = {
    "digits": (DIGITS_CLASSES, digits),
    "library": (256, library_source),
}

#: Options that are paths, and of what.
PATHS = {"data": "file", "labels": "file", "output": "folder", "resume": "folder", "trace": "file"}

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
    data = p.add_argument_group("data")
    data.add_argument(
        "--data",
        default="digits",
        metavar="FILE",
        help="digits (scikit-learn's), library (the source of Python's standard library, byte by "
        "byte), a .npz with arrays x and y, or a .npy (default: digits)",
    )
    data.add_argument("--labels", metavar="FILE", help="the labels, where --data is a .npy")
    data.add_argument(
        "--classes",
        type=int,
        metavar="N",
        help="labels are from 0 to N - 1 (default: as many as the labels show)",
    )
    data.add_argument(
        "--test",
        type=float,
        default=0.2,
        metavar="X",
        help="fraction of the samples that is kept for testing (default: 0.2)",
    )
    model = p.add_argument_group("model")
    model.add_argument(
        "--model",
        choices=("mlp", "softmax", "bytes"),
        help="bytes: a language model of the bytes before (default: mlp, or for --data library "
        "bytes)",
    )
    model.add_argument(
        "--hidden",
        type=int,
        nargs="+",
        metavar="N",
        help="units of each hidden layer of mlp or bytes (default: 128)",
    )
    model.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the model and its gradients live (cuda needs CuPy)",
    )
    run = p.add_argument_group("run")
    run.add_argument("--epochs", type=int, default=30, metavar="N", help="(default: 30)")
    run.add_argument(
        "--minibatch-size",
        type=int,
        default=64,
        metavar="N",
        help="samples of all ranks together in a minibatch (default: 64)",
    )
    run.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of split, model and order (default: 0)"
    )
    run.add_argument(
        "--output", metavar="FOLDER", help="new folder for the results (default: runs/<time>)"
    )
    run.add_argument("--no-plot", action="store_true", help="do not draw the loss curve")
    run.add_argument(
        "--compare-serial",
        action="store_true",
        help="afterwards train on rank 0 alone, in full precision, and show both",
    )
    run.add_argument(
        "--timeout-s",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help=f"longest wait for other ranks, in seconds (default: {TIMEOUT_S:g})",
    )
    run.add_argument(
        "--cuda-aware",
        action="store_true",
        help="pass GPU arrays to MPI directly: only where your MPI is CUDA-aware",
    )
    add_measuring_options(p)
    add_saving_options(p)
    choose = p.add_argument_group("method")
    add_choices(choose)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says. Collective over all ranks that were started."""
    with abort_on_error():
        try:
            options, algorithm, optimizer = read(argv)
        except UserError as error:  # said by every rank before the first one ends the job
            Communicator.world().raise_together(str(error))
            raise
        comm = Communicator.world(timeout_s=options.timeout_s, cuda_aware=options.cuda_aware)
        train_on(options, algorithm, optimizer, comm)
    return 0


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Algorithm[Any], Optimizer]:
    """The options, with the algorithm and the optimizer that they describe. Local.

    Raises:
        UserError: an option or its value is wrong.
    """
    choices = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_choices(choices)
    try:
        chosen, _ = choices.parse_known_args(argv)
        full = parser(chosen.algorithm, chosen.optimizer)
    except argparse.ArgumentError:  # of which the whole parser tells
        full = parser()
    options = full.parse_args(argv)
    if not hasattr(options, "lr") and not hasattr(options, "lr_per_sample"):
        options.lr = DEFAULT_LR[options.optimizer]
    for name, what in PATHS.items():
        if getattr(options, name) is not None:
            checked_path(name, getattr(options, name), what)
    checked_timeout(options.timeout_s)
    _require_use(options)
    algorithm = build(options.algorithm, ALGORITHMS, options)
    optimizer = build(options.optimizer, OPTIMIZERS, options)
    outer = getattr(algorithm, "outer", None)
    if isinstance(outer, OuterStep):
        for name in {"inner_state", "reset_sgd_momentum"} & values_of(outer).keys():
            has_state = bool(optimizer.initial_values)
            outer.require_use(name, has_state, "an --optimizer that has a state")
    return options, algorithm, optimizer


def train_on(
    options: argparse.Namespace, algorithm: Algorithm[Any], optimizer: Optimizer, comm: Communicator
) -> None:
    """Train as the options say, on the ranks of `comm`. Collective; changes `options`."""
    comm.require_agreement({"algorithm": options.algorithm})
    comm.together(lambda: _require_use_of_servers(algorithm))
    local_rank = comm.local_rank
    workers = algorithm.roles.workers(comm)
    first = comm.rank == workers[0]  # which writes and reports

    def prepare() -> tuple[Dataset, Dataset]:
        if options.device == "cuda":
            use_gpu(local_rank)
        if first and not options.no_plot:
            require_matplotlib()
        data = _load(options)
        _model(options, data[0])  # refuses options that do not fit
        return data

    train, test = comm.together(prepare)
    kinds: list[Any] = [*ALGORITHMS.values(), *OPTIMIZERS.values()]
    described_below = {option.name for kind in kinds for option in all_options(kind)}
    described = {
        "parallel_sgd": __version__,
        "ranks": comm.size,
        "workers": len(workers),
        "host": platform.node(),
        **{name: value for name, value in vars(options).items() if name not in described_below},
        "algorithm": describe(algorithm),
        "optimizer": describe(optimizer),
    }
    resumed = comm.together(lambda: resumed_run(options))
    output = options.output or resumed or time.strftime("runs/%Y-%m-%d-%H%M%S")
    output = comm.allgather_object(output)[workers[0]]  # one time for all
    folder = RunFolder(output, described, resumed=bool(resumed)) if first else None

    def session(
        comm: Communicator, algorithm: Algorithm[Any], folder: RunFolder | None, **saving: Any
    ) -> Session:
        return Session(
            model=_model(options, train),
            train=train,
            test=test,
            optimizer=optimizer,
            algorithm=algorithm,
            comm=comm,
            minibatch_size=options.minibatch_size,
            epochs=options.epochs,
            seed=options.seed,
            folder=folder,
            report=lambda progress: print_progress(progress, options.epochs),
            **saving,
        )

    if first:
        ranks = ranks_in_words(comm.size, len(workers))
        print(f"{ranks}, {len(train)} samples\n{algorithm}\n{optimizer}", flush=True)
        period = getattr(algorithm, "period", None)
        if isinstance(period, BlockPeriod):
            samples = max(len(train) * options.epochs - algorithm.distributed_after, 0)
            print(blocks(period, samples, options.minibatch_size, comm.size), flush=True)
    parallel = session(
        comm,
        algorithm,
        folder,
        checkpoints=Path(output, CHECKPOINTS),
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        resume=options.resume,
        trace=options.trace,
        sync_perf_stats=options.sync_perf_stats,
        started=print_choices,
    )
    history = parallel.run()
    serial = None
    if first and options.compare_serial:
        print("serial SGD, same seed:", flush=True)
        serial = session(Communicator.single(), ALGORITHMS["data-parallel"](), None).run()
    if folder:
        name = ranks_in_words(comm.size, len(workers))
        finish(folder, parallel, name, history, serial, plot=not options.no_plot)
        if options.trace:
            print(f"trace                     {options.trace}, for https://ui.perfetto.dev")


def _require_use(options: argparse.Namespace) -> None:
    """See that no option was given in vain; those of algorithm and optimizer see to theirs."""
    saves, cuda = options.checkpoint_every > 0, options.device == "cuda"
    require_use("keep", options.keep, KEEP, saves, "--checkpoint-every N")
    require_use("cuda_aware", options.cuda_aware, False, cuda, "--device cuda")
    if options.labels and options.data in BUNDLED:
        raise UserError(f"labels={shown(options.labels)}: {options.data} has labels of its own")
    if options.hidden and options.model == "softmax":
        raise UserError(f"hidden={shown(options.hidden)}: a softmax model has no hidden layers")
    free = _kind_of_model(options) != "bytes"
    require_use("classes", options.classes, None, free, "a --model whose classes are not the bytes")


def _require_use_of_servers(algorithm: Algorithm[Any]) -> None:
    """See that `parallel-sgd run --servers` is heeded."""
    requested = requested_servers()
    if requested is None:
        return
    if not isinstance(algorithm.roles, ParameterServers):
        raise UserError(f"servers={requested} of `parallel-sgd run` needs --algorithm async")
    if algorithm.roles.servers not in (None, requested):
        raise UserError(
            f"servers={algorithm.roles.servers} of train.py must be that of `parallel-sgd run`, "
            f"{requested}: give one of them"
        )


def _load(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Training and test data; finds out the number of classes where it was not given."""
    if options.data in BUNDLED:
        classes, read_bundled = BUNDLED[options.data]
        options.classes = classes if options.classes is None else options.classes
        return read_bundled(test=options.test, seed=options.seed)
    data = load(options.data, options.labels)
    options.classes = count_classes(data, options.classes)
    train, test = data.split(options.test, seed=options.seed)
    return flattened(train), flattened(test)


def _kind_of_model(options: argparse.Namespace) -> str:
    return options.model or ("bytes" if options.data == "library" else "mlp")


def _model(options: argparse.Namespace, train: Dataset) -> Classifier:
    x, _ = train.read(np.arange(1), classes=options.classes)
    inputs, where = x[0].size, {"seed": options.seed, "device": options.device}
    hidden = options.hidden or [128]
    match _kind_of_model(options):
        case "softmax":
            return SoftmaxRegression(inputs, options.classes, **where)
        case "bytes":
            return ByteLanguageModel(inputs, hidden=hidden, **where)
        case _:
            return MLP([inputs, *hidden, options.classes], **where)


if __name__ == "__main__":
    sys.exit(main())
