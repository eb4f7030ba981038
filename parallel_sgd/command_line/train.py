"""`parallel-sgd train`, and what train.py runs: train a classifier on data, on all ranks."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS, Algorithm, BlockPeriod, OuterStep
from ..communication import Communicator, checked_timeout
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
from .options import build, describe
from .reporting import blocks, finish, print_choices, print_progress, ranks_in_words
from .train_options import DEFAULT_LR, KEEP, add_choices, parser

#: Data that need no file: the number of classes, and who reads them.
BUNDLED: dict[str, tuple[int, Callable[..., tuple[Dataset, Dataset]]]] = {
    "digits": (DIGITS_CLASSES, digits),
    "library": (256, library_source),
}

#: Options that are paths, and of what.
PATHS = {"data": "file", "labels": "file", "output": "folder", "resume": "folder", "trace": "file"}


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
    """Read options, algorithm and optimizer; raises a UserError where one is wrong. Local."""
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
    resumed = comm.together(lambda: _resumed_run(options))
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


def _resumed_run(options: argparse.Namespace) -> str | None:
    """The run's folder that --resume means, without --output; raises a UserError for none."""
    if options.resume is None or options.output:
        return None
    path = Path(options.resume)
    for folder in (path, path.parent, path.parent.parent):
        if os.path.isfile(folder / "options.json"):
            return str(folder)
    raise UserError(f"resume={shown(options.resume)} is in no run's folder: give --output too")


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
