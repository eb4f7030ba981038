"""Train a model on data, on all ranks: `parallel-sgd train` and train.py."""

from __future__ import annotations

import argparse
import copy
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from ...algorithms import ALGORITHMS, Algorithm, BlockPeriod
from ...communication import Communicator
from ...communication.entry_point import abort_on_error
from ...communication.job_environment import job_name, requested_servers
from ...data.shares import read_shares
from ...data.sources.minibatches import size_after
from ...errors import SMALLER_RATE, SharedError, UserError
from ...models import use_gpu
from ...optimizers import OPTIMIZERS, Optimizer
from ...options import all_options
from ...parameter_server import ParameterServers
from ...training import (
    CHECKPOINTS,
    CheckpointConfig,
    CrossValidation,
    Progress,
    RunFolder,
    Tracker,
    TrainingSession,
    require_installed_matplotlib,
    traced,
)
from ...training.checkpoint.files import checkpoints_in
from ...training.session.progress_bar import on_terminal
from ...training.session.run_folder import require_tensorboard
from ...training.session.tracker import PROJECT
from ...validation import shown
from ...version import __version__
from ..options import describe
from .arguments import ADJUSTMENTS, adjustment_rules, described_as_config, read, run_of
from .config import COMMAND_LINE_ONLY, RUN_ONLY
from .data import TrainingData, data_facts, read_data, standardized
from .model import TrainingModel, kind_of_model, make_model
from .options import parser
from .reporting import (
    blocks,
    failures_in_words,
    finish,
    print_choices,
    print_progress,
    ranks_in_words,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Train according to the command line, and return 0.

    Collective over all ranks that were started.
    """
    with abort_on_error():
        try:
            options, algorithm, optimizer = read(argv)
        except UserError as error:  # all ranks print it before the first rank ends the job
            Communicator.world().raise_together(str(error))
            raise
        comm = Communicator.world(timeout_s=options.timeout_s, cuda_aware=options.cuda_aware)
        if options.print_config:
            comm.print(described_as_config(options, algorithm, optimizer, whole=True), end="")
            return 0
        train_on(options, algorithm, optimizer, comm)
    return 0


def train_on(
    options: argparse.Namespace, algorithm: Algorithm[Any], optimizer: Optimizer, comm: Communicator
) -> None:
    """Train according to the options, on the ranks of `comm`. Collective; changes `options`."""
    comm.require_agreement({"algorithm": options.algorithm})
    comm.together(lambda: _require_use_of_servers(algorithm))
    local_rank = comm.local_rank
    workers = algorithm.roles.workers(comm)
    trainers, first = sum(map(len, workers)), workers[0][0]
    is_reporter = comm.rank == first
    tracker = comm.together(lambda: _tracker(options))

    def prepare() -> TrainingData:
        if options.device == "cuda":
            use_gpu(local_rank)
        if is_reporter and not options.no_plot:
            require_installed_matplotlib()
        if is_reporter and options.tensorboard:
            require_tensorboard()
        if is_reporter and tracker:
            tracker.require()
        data = read_data(options)
        make_model(options, data)  # raises for options that do not fit
        return data

    original = copy.copy(options)
    data = comm.together(prepare)
    if options.distributed_after_epochs is not None:
        algorithm = comm.together(
            lambda: _after_epochs(algorithm, options.distributed_after_epochs, len(data.train))
        )
    resumed = comm.together(lambda: _resumed_run(options))
    starts_anew = comm.allgather_object(_lost_before_checkpoint(resumed, options.resume))[first]
    if starts_anew:
        options.resume = None
    data = standardized(data, options, run_of(options.resume), comm)
    options.standardize = original.standardize = data.standardization is not None
    output = options.output or resumed or _new_output()
    output = comm.allgather_object(output)[first]  # the same folder on all ranks
    options.output = output
    ranks = ranks_in_words(comm.size, trainers, len(workers))
    folder = RunFolder(
        output,
        _described(options, data, algorithm, optimizer, comm.size, trainers, len(workers)),
        config=described_as_config(
            original,
            algorithm,
            optimizer,
            heading=[f"A run on {ranks}, of parallel_sgd {__version__}."],
        ),
        resumed=bool(resumed),
        tensorboard=options.tensorboard,
        standardization=data.standardization,
    )
    if is_reporter and starts_anew:
        print(f"{output} has no checkpoint yet: the run begins anew", flush=True)
    if is_reporter:
        print(f"{ranks}, {len(data.train)} samples")
        if data.sources:
            print(data.sources)
        print(f"{algorithm.brief()}, {optimizer.brief()}", flush=True)
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
        parallel = _session(options, data, model, learner, folder, checkpoints, tracker)
        try:
            history = parallel.run()
        except SharedError as error:
            raise _with_hint(error, options, data, learner.samples) from None
        # A different rank reports if the first worker has failed.
        is_reporter = comm.rank == learner.group.workers[0]
    ranks += failures_in_words(len(comm.failed_ranks))
    serial = None
    if is_reporter and options.compare_serial:
        print("serial SGD, same seed:", flush=True)
        serial = _train_serially(options, data, optimizer)
    if is_reporter:
        steps = _minibatches(options, len(data.train))
        full = steps * 2 * (comm.size - 1) * learner.parameters.flat.nbytes
        finish(folder, parallel, full, ranks, history, serial, plot=not options.no_plot)
        if options.trace:
            print(f"{'trace':24s} {options.trace}, for https://ui.perfetto.dev")


def _session(
    options: argparse.Namespace,
    data: TrainingData,
    model: TrainingModel,
    learner: Any,
    folder: RunFolder | None,
    checkpoints: CheckpointConfig | None,
    tracker: Tracker | None = None,
) -> TrainingSession:
    def report(progress: Progress) -> None:
        print_progress(progress, options.epochs)

    test = model.given(data.test)
    has_validation = data.validation is not None
    validation = CrossValidation(
        data=test if data.validation is None else model.given(data.validation),
        name="validation" if has_validation else "test",
        every=options.validate_every,
        criterion=options.criterion,
        patience=options.patience,
        min_improvement=options.min_improvement,
        restore_best=options.restore_best,
    )
    return TrainingSession(
        learner=learner,
        objective=model.objective,
        train=model.given(data.train),
        minibatch_size=options.minibatch_size,
        epochs=options.epochs,
        seed=options.seed,
        rate_follows=options.rate_follows,
        microbatch_size=options.microbatch_size,
        shares=None if options.shares is None else read_shares(options.shares),
        validation=validation,
        test=test if has_validation else None,
        progress_every=options.progress_every,
        checkpoints=checkpoints,
        folder=folder,
        tracker=tracker,
        report=report,
        started=print_choices if folder else None,
        progress_bar=folder is not None and on_terminal() and not options.no_progress_bar,
        **adjustment_rules(options),
    )


def _train_serially(
    options: argparse.Namespace, data: TrainingData, optimizer: Optimizer
) -> list[Progress]:
    """Train the same model on this rank alone, in full precision."""
    model, comm = make_model(options, data), Communicator.single()
    with model.learner(optimizer, ALGORITHMS["data-parallel"](), comm, options) as learner:
        return _session(options, data, model, learner, None, None).run()


def _described(
    options: argparse.Namespace,
    data: TrainingData,
    algorithm: Algorithm[Any],
    optimizer: Optimizer,
    ranks: int,
    trainers: int,
    workers: int,
) -> dict[str, Any]:
    """Return the content of options.json."""
    kinds: list[Any] = [*ALGORITHMS.values(), *OPTIMIZERS.values(), *ADJUSTMENTS.values()]
    described_below = {option.name for kind in kinds for option in all_options(kind)}
    own = {name: value for name, value in vars(options).items() if name not in described_below}
    default = parser().get_default
    changed = {
        name: value
        for name, value in own.items()
        if name not in COMMAND_LINE_ONLY | RUN_ONLY and value != default(name)
    }
    return {
        "parallel_sgd": __version__,
        "ranks": ranks,
        "trainers": trainers,
        "workers": workers,
        "host": platform.node(),
        **{
            name: value if not hasattr(value, "keys") else {str(k): v for k, v in value.items()}
            for name, value in own.items()
        },
        "classes": data.task.classes,
        "outputs": data.task.outputs,
        **data_facts(data.train),
        "task": data.task.name,
        "algorithm": describe(algorithm),
        "optimizer": describe(optimizer),
        "changed": {name: str(value) for name, value in changed.items()}
        | {"algorithm": algorithm.brief(), "optimizer": optimizer.brief()},
    }


def _checkpoints(options: argparse.Namespace, output: str) -> CheckpointConfig:
    return CheckpointConfig(
        folder=Path(output, CHECKPOINTS),
        every=options.checkpoint_every or None,
        every_s=options.checkpoint_every_s,
        keep=options.keep,
        resume=options.resume,
    )


def _tracker(options: argparse.Namespace) -> Tracker | None:
    if options.tracker is None:
        return None
    return Tracker(options.tracker, PROJECT if options.project is None else options.project)


def _minibatches(options: argparse.Namespace, samples: int) -> int:
    """Return the number of minibatches of the run, by the requested sizes."""
    count = 0
    for epoch in range(options.epochs):
        seen = 0
        while seen < samples:
            seen += size_after(options.minibatch_size, epoch * samples + seen)
            count += 1
    return count


def _new_output() -> str:
    """Return runs/<job>, or runs/<time> with a number added if that folder exists. Local."""
    if job := job_name():
        return f"runs/{job}"
    path = time.strftime("runs/%Y-%m-%d-%H%M%S")
    numbered = (f"{path}-{number}" for number in count(2))
    return next(free for free in chain([path], numbered) if not os.path.lexists(free))


def _after_epochs(algorithm: Algorithm[Any], epochs: int, samples: int) -> Algorithm[Any]:
    """Return the algorithm with a warm start of this many epochs."""
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
    """Return the run's folder meant by --resume without --output, or None without --resume.

    Raises:
        UserError: --resume is not in a run's folder.
    """
    if options.resume is None or options.output:
        return None
    run = run_of(options.resume)
    if run is None:
        raise UserError(f"resume={shown(options.resume)} is in no run's folder: give --output too")
    return run


def _lost_before_checkpoint(run: str | None, resume: str | None) -> bool:
    """Return True if a run resumed in its own folder was lost before its first checkpoint."""
    if run is None or resume is None:
        return False
    folder = Path(run, CHECKPOINTS)
    return Path(resume) in (Path(run), folder) and not checkpoints_in(folder)


def _with_hint(
    error: SharedError, options: argparse.Namespace, data: TrainingData, samples: int
) -> SharedError:
    """Return the error, with a hint at --standardize if training diverged in its first epoch."""
    standardizes = data.standardization is not None or kind_of_model(options) == "bytes"
    if SMALLER_RATE not in str(error) or standardizes or samples > len(data.train):
        return error
    hint = f"{SMALLER_RATE}, or --standardize, if features are large"
    return SharedError(str(error).replace(SMALLER_RATE, hint))


def _require_use_of_servers(algorithm: Algorithm[Any]) -> None:
    """Raise a UserError if the algorithm ignores the servers of `parallel-sgd run --servers`."""
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
