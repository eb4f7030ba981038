"""`parallel-sgd train`, and what train.py runs: train a model on data, on all ranks."""

from __future__ import annotations

import argparse
import copy
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS, Algorithm, BlockPeriod, OuterStep
from ..communication import Communicator, checked_timeout
from ..communication.entry_point import abort_on_error
from ..communication.launched import requested_servers
from ..data.minibatches import size_after
from ..errors import UserError
from ..models import use_gpu
from ..optimizers import OPTIMIZERS, Optimizer
from ..options import all_options, values_of
from ..parameter_server import ParameterServers
from ..training import (
    CHECKPOINTS,
    AutoLearningRate,
    AutoMinibatchSize,
    CheckpointConfig,
    CrossValidation,
    Progress,
    RunFolder,
    TrainingSession,
    require_matplotlib,
    traced,
)
from ..training.progress_bar import on_terminal
from ..training.run_folder import require_tensorboard
from ..validation import checked_path, checked_seed, require_use, shown
from ..version import __version__
from .config import arguments_of, config_text, leave_out_defaults
from .options import build, describe
from .reporting import blocks, finish, print_choices, print_progress, ranks_in_words
from .train_data import TrainingData, read_data, require_data_options
from .train_model import TrainingModel, make_model, require_model_options
from .train_options import DEFAULT_LR, KEEP, SIZES, add_choices, parser

#: Options that are paths, and of what.
PATHS = {
    "config": "TOML file",
    "data": "file",
    "labels": "file",
    "initial_model": "folder",
    "output": "folder",
    "resume": "folder",
    "trace": "file",
}

CHOICES: dict[str, Mapping[str, type]] = {"algorithm": ALGORITHMS, "optimizer": OPTIMIZERS}

ADJUSTING = {"auto_minibatch_size": AutoMinibatchSize, "auto_learning_rate": AutoLearningRate}


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says. Collective over all ranks that were started."""
    with abort_on_error():
        try:
            options, algorithm, optimizer = read(argv)
        except UserError as error:  # said by every rank before the first one ends the job
            Communicator.world().raise_together(str(error))
            raise
        comm = Communicator.world(timeout_s=options.timeout_s, cuda_aware=options.cuda_aware)
        if options.print_config:
            comm.print(described_as_config(options, algorithm, optimizer, whole=True), end="")
            return 0
        train_on(options, algorithm, optimizer, comm)
    return 0


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Algorithm[Any], Optimizer]:
    """Read options, algorithm and optimizer; raises a UserError where one is wrong. Local."""
    given = list(sys.argv[1:] if argv is None else argv)
    from_file: list[str] = []
    from_line: list[str] = []
    if given and not given[0].startswith("-"):
        path = str(checked_path("config", given[0], PATHS["config"]))
        from_file = arguments_of(path, parser())
        try:
            _parser_for(from_file).parse_args(from_file)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        from_line = given[1:]
        given = [*from_file, *from_line]
    options = _parser_for(given).parse_args(given)
    if from_file:
        of_file, of_line = (_parser_for(part).parse_args(part) for part in (from_file, from_line))
        leave_out_defaults(options, of_file, of_line, CHOICES)
    if options.config is not None:
        raise UserError(f"config={shown(options.config)} must be the first argument")
    if not hasattr(options, "lr") and not hasattr(options, "lr_per_sample"):
        options.lr = DEFAULT_LR[options.optimizer]
    for name, what in PATHS.items():
        if getattr(options, name) is not None:
            checked_path(name, getattr(options, name), what)
    checked_timeout(options.timeout_s)
    checked_seed(options.seed)
    options.minibatch_size = SIZES("minibatch_size", options.minibatch_size)
    _require_use(options)
    algorithm = build(options.algorithm, ALGORITHMS, options)
    optimizer = build(options.optimizer, OPTIMIZERS, options)
    outer = getattr(algorithm, "outer", None)
    if isinstance(outer, OuterStep):
        for name in {"inner_state", "reset_sgd_momentum"} & values_of(outer).keys():
            has_state = bool(optimizer.initial_values)
            outer.require_use(name, has_state, "an --optimizer that has a state")
    return options, algorithm, optimizer


def _parser_for(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser that shows the options of the algorithm and the optimizer that are chosen."""
    choices = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_choices(choices)
    try:
        chosen, _ = choices.parse_known_args(arguments)
        return parser(chosen.algorithm, chosen.optimizer)
    except argparse.ArgumentError:  # of which the whole parser tells
        return parser()


def described_as_config(
    options: argparse.Namespace,
    algorithm: Algorithm[Any],
    optimizer: Optimizer,
    *,
    heading: Sequence[str] = (),
    whole: bool = False,
) -> str:
    """The options as a file that gives the same run again. Local.

    Args:
        heading, whole: as for `config_text`.
    """
    adjusted = {
        name: value for kind in _adjusting(options) for name, value in values_of(kind).items()
    }
    values = {**values_of(algorithm), **values_of(optimizer), **adjusted, **vars(options)}
    if options.distributed_after_epochs is not None:  # else it would be given twice
        values["distributed_after"] = None
    shown_parser = parser(options.algorithm, options.optimizer)
    return config_text(shown_parser, values, heading=heading, whole=whole)


def _adjusting(options: argparse.Namespace) -> list[Any]:
    """The rules that adjust training, of those that were asked for."""
    return [
        build(name, {name: kind}, options)
        for name, kind in ADJUSTING.items()
        if getattr(options, name)
    ]


def train_on(
    options: argparse.Namespace, algorithm: Algorithm[Any], optimizer: Optimizer, comm: Communicator
) -> None:
    """Train as the options say, on the ranks of `comm`. Collective; changes `options`."""
    comm.require_agreement({"algorithm": options.algorithm})
    comm.together(lambda: _require_use_of_servers(algorithm))
    local_rank = comm.local_rank
    workers = algorithm.roles.workers(comm)
    first = comm.rank == workers[0]  # which writes and reports

    def prepare() -> TrainingData:
        if options.device == "cuda":
            use_gpu(local_rank)
        if first and not options.no_plot:
            require_matplotlib()
        if first and options.tensorboard:
            require_tensorboard()
        data = read_data(options)
        make_model(options, data)  # refuses options that do not fit
        return data

    asked = copy.copy(options)
    data = comm.together(prepare)
    if options.distributed_after_epochs is not None:
        algorithm = comm.together(
            lambda: _after_epochs(algorithm, options.distributed_after_epochs, len(data.train))
        )
    resumed = comm.together(lambda: _resumed_run(options))
    output = options.output or resumed or time.strftime("runs/%Y-%m-%d-%H%M%S")
    output = comm.allgather_object(output)[workers[0]]  # one time for all
    options.output = output
    ranks = ranks_in_words(comm.size, len(workers))
    folder = RunFolder(
        output,
        _described(options, data, algorithm, optimizer, comm.size, len(workers)),
        config=described_as_config(
            asked,
            algorithm,
            optimizer,
            heading=[f"A run on {ranks}, of parallel_sgd {__version__}."],
        ),
        resumed=bool(resumed),
        tensorboard=options.tensorboard,
    )
    if first:
        print(f"{ranks}, {len(data.train)} samples\n{algorithm}\n{optimizer}", flush=True)
        period = getattr(algorithm, "period", None)
        if isinstance(period, BlockPeriod):
            samples = max(len(data.train) * options.epochs - algorithm.distributed_after, 0)
            size = size_after(options.minibatch_size, 0)
            print(blocks(period, samples, size, comm.size), flush=True)
    checkpoints = None
    if options.checkpoint_every or options.checkpoint_every_s or options.resume:
        checkpoints = comm.together(lambda: _checkpoints(options, output))
    model = make_model(options, data)
    trace = comm.together(lambda: options.trace and str(options.trace))
    tracing = traced(trace, comm, after_errors=algorithm.roles.together) if trace else nullcontext()
    with tracing, model.learner(optimizer, algorithm, comm, options) as learner:
        parallel = _session(options, data, model, learner, folder, checkpoints)
        history = parallel.run()
    serial = None
    if first and options.compare_serial:
        print("serial SGD, same seed:", flush=True)
        serial = _train_serially(options, data, optimizer)
    if first:
        steps = _minibatches(options, len(data.train))
        full = steps * 2 * (comm.size - 1) * learner.parameters.flat.nbytes
        finish(folder, parallel, full, ranks, history, serial, plot=not options.no_plot)
        if options.trace:
            print(f"trace                     {options.trace}, for https://ui.perfetto.dev")


def _session(
    options: argparse.Namespace,
    data: TrainingData,
    model: TrainingModel,
    learner: Any,
    folder: RunFolder | None,
    checkpoints: CheckpointConfig | None,
) -> TrainingSession:
    def report(progress: Progress) -> None:
        print_progress(progress, options.epochs)

    test = model.given(data.test)
    own = data.validation is not None
    validation = CrossValidation(
        data=test if data.validation is None else model.given(data.validation),
        name="validation" if own else "test",
        every=options.validate_every,
        criterion=options.criterion,
        patience=options.patience,
        min_improvement=options.min_improvement,
        restore_best=options.restore_best,
    )
    adjusting = {
        name: build(name, {name: kind}, options)
        for name, kind in ADJUSTING.items()
        if getattr(options, name)
    }
    return TrainingSession(
        learner=learner,
        objective=model.objective,
        train=model.given(data.train),
        minibatch_size=options.minibatch_size,
        epochs=options.epochs,
        seed=options.seed,
        rate_follows=options.rate_follows,
        microbatch_size=options.microbatch_size,
        validation=validation,
        test=test if own else None,
        progress_every=options.progress_every,
        checkpoints=checkpoints,
        folder=folder,
        report=report,
        started=print_choices if folder else lambda learner: None,
        progress_bar=folder is not None and on_terminal() and not options.no_progress_bar,
        **adjusting,
    )


def _train_serially(
    options: argparse.Namespace, data: TrainingData, optimizer: Optimizer
) -> list[Progress]:
    """The same on this rank alone, in full precision."""
    model, comm = make_model(options, data), Communicator.single()
    with model.learner(optimizer, ALGORITHMS["data-parallel"](), comm, options) as learner:
        return _session(options, data, model, learner, None, None).run()


def _described(
    options: argparse.Namespace,
    data: TrainingData,
    algorithm: Algorithm[Any],
    optimizer: Optimizer,
    ranks: int,
    workers: int,
) -> dict[str, Any]:
    """What options.json holds."""
    kinds: list[Any] = [*ALGORITHMS.values(), *OPTIMIZERS.values(), *ADJUSTING.values()]
    described_below = {option.name for kind in kinds for option in all_options(kind)}
    return {
        "parallel_sgd": __version__,
        "ranks": ranks,
        "workers": workers,
        "host": platform.node(),
        **{
            name: value if not hasattr(value, "keys") else {str(k): v for k, v in value.items()}
            for name, value in vars(options).items()
            if name not in described_below
        },
        "classes": data.task.classes,
        "task": data.task.name,
        "algorithm": describe(algorithm),
        "optimizer": describe(optimizer),
    }


def _checkpoints(options: argparse.Namespace, output: str) -> CheckpointConfig:
    return CheckpointConfig(
        folder=Path(output, CHECKPOINTS),
        every=options.checkpoint_every or None,
        every_s=options.checkpoint_every_s,
        keep=options.keep,
        resume=options.resume,
    )


def _minibatches(options: argparse.Namespace, samples: int) -> int:
    """How many minibatches the run has, as they were asked for."""
    count = 0
    for epoch in range(options.epochs):
        seen = 0
        while seen < samples:
            seen += size_after(options.minibatch_size, epoch * samples + seen)
            count += 1
    return count


def _after_epochs(algorithm: Algorithm[Any], epochs: int, samples: int) -> Algorithm[Any]:
    """The algorithm, which begins after so many epochs."""
    if epochs < 1:
        raise UserError(f"distributed_after_epochs={epochs} must be at least 1")
    if algorithm.distributed_after:
        raise UserError(
            f"distributed_after={algorithm.distributed_after} and distributed_after_epochs="
            f"{epochs}: at most one of them may be given"
        )
    if "distributed_after" not in {option.name for option in all_options(type(algorithm))}:
        raise UserError(
            f"distributed_after_epochs={epochs}: {type(algorithm).__name__} has no warm start"
        )
    changed: Algorithm[Any] = replace(algorithm, distributed_after=epochs * samples)
    return changed


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
    saves = options.checkpoint_every > 0 or options.checkpoint_every_s is not None
    cuda = options.device == "cuda"
    require_use("keep", options.keep, KEEP, saves, "--checkpoint-every N")
    require_use("cuda_aware", options.cuda_aware, False, cuda, "--device cuda")
    require_data_options(options)
    require_model_options(options)
    for name, kind in ADJUSTING.items():
        for option in all_options(kind):
            if hasattr(options, option.name) and not getattr(options, name):
                value, flag = getattr(options, option.name), name.replace("_", "-")
                raise UserError(f"{option.name}={shown(value)} has no effect without --{flag}")


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


if __name__ == "__main__":
    sys.exit(main())
