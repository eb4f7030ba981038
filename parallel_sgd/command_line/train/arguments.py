"""Read and check the arguments of train.py, also from a file, and write them as a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...algorithms import ALGORITHMS, Algorithm, OuterStep
from ...argument_parser import path_given
from ...communication import checked_timeout
from ...errors import UserError
from ...optimizers import OPTIMIZERS, Optimizer
from ...options import all_options, values_of
from ...training import AutoLearningRate, AutoMinibatchSize, NotFinitePolicy
from ...training.checkpoint.retention import KEEP
from ...training.reports.record import OPTIONS
from ...training.session.run_folder import CONFIG
from ...validation import checked_path, checked_seed, require_use, shown
from ..options import build
from .config import arguments_of, config_text, drop_unchosen_defaults, settable
from .data import require_data_options
from .model import require_model_options
from .options import DEFAULT_LR, SIZES, add_choices, parser

#: Options that are paths, and the kind of each.
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

ADJUSTMENTS = {"auto_minibatch_size": AutoMinibatchSize, "auto_learning_rate": AutoLearningRate}


def read(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Algorithm[Any], Optimizer]:
    """Read options, algorithm and optimizer. Local.

    Args:
        argv: the arguments; None: those of this process.

    Raises:
        UserError: an argument is wrong.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    path, from_line = _file_and_line(given)
    options = _parser_for(from_line).parse_args(from_line)
    if path is None and options.resume is not None:
        path = _config_of_run(options.resume)
    if path is not None:
        from_file = arguments_of(path, parser())
        try:
            of_file = _parser_for(from_file).parse_args(from_file)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        of_line, both = options, [*from_file, *from_line]
        options = _parser_for(both).parse_args(both)
        drop_unchosen_defaults(options, of_file, of_line, CHOICES)
    if options.config is not None:
        raise UserError(f"config={shown(options.config)} must be the first argument")
    if not hasattr(options, "lr") and not hasattr(options, "lr_per_sample"):
        options.lr = DEFAULT_LR[options.optimizer]
    for name, what in PATHS.items():
        if getattr(options, name) is not None:
            setattr(options, name, path_given(name, getattr(options, name)))
            checked_path(name, getattr(options, name), what)
    if options.timeout_s is not None:
        checked_timeout(options.timeout_s)
    checked_seed(options.seed)
    options.minibatch_size = SIZES("minibatch_size", options.minibatch_size)
    _require_use(options)
    _require_other_folder(options)
    adjustment_rules(options)  # raises for impossible combinations
    algorithm = build(options.algorithm, ALGORITHMS, options)
    optimizer = build(options.optimizer, OPTIMIZERS, options)
    outer = getattr(algorithm, "outer", None)
    if isinstance(outer, OuterStep):
        for name in {"inner_state", "reset_sgd_momentum"} & values_of(outer).keys():
            has_state = bool(optimizer.initial_values)
            outer.require_use(name, has_state, "an --optimizer that has a state")
    return options, algorithm, optimizer


def _file_and_line(given: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split the arguments into the file of options, if any, and the rest of the command line."""
    if not given or given[0].startswith("-"):
        return None, list(given)
    return checked_path("config", path_given("config", given[0]), PATHS["config"]), [*given[1:]]


def _config_of_run(resume: str) -> Path | None:
    """Return the file of options of the run to resume, or None if the run has none."""
    run = run_of(path_given("resume", resume))
    return Path(run, CONFIG) if run is not None and Path(run, CONFIG).is_file() else None


def run_of(path: str | None) -> str | None:
    """Return the folder of the run that a path belongs to, or None.

    The path is the run's folder, the folder of its checkpoints, or a checkpoint.
    """
    if path is None:
        return None
    folders = (Path(path), Path(path).parent, Path(path).parent.parent)
    return next((str(folder) for folder in folders if (folder / OPTIONS).is_file()), None)


def _require_other_folder(options: argparse.Namespace) -> None:
    """Raise a UserError if --output names the run that --resume continues in its own folder."""
    if options.output is None or options.resume is None:
        return
    run = run_of(options.resume)
    if run is not None and Path(run).resolve() == Path(options.output).resolve():
        raise UserError(
            f"output={shown(options.output)} and resume={shown(options.resume)} are the same run, "
            "which goes on in its own folder: omit --output"
        )


def _parser_for(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the help of the chosen algorithm and optimizer."""
    choices = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_choices(choices)
    try:
        chosen, _ = choices.parse_known_args(arguments)
        flags = {argument.partition("=")[0] for argument in arguments}
        own_first = not flags.isdisjoint(f"--{name}" for name in CHOICES)
        return parser(chosen.algorithm, chosen.optimizer, own_first=own_first)
    except argparse.ArgumentError:  # the full parser reports the error
        return parser()


def described_as_config(
    options: argparse.Namespace,
    algorithm: Algorithm[Any],
    optimizer: Optimizer,
    *,
    heading: Sequence[str] = (),
    whole: bool = False,
    only: Collection[str] | None = None,
) -> str:
    """Return the options as a file that gives the same run again. Local.

    Args:
        options, algorithm, optimizer: the options, from `read`.
        heading, whole, only: see `config_text`.
    """
    adjusted = {
        name: value
        for rule in adjustment_rules(options).values()
        for name, value in values_of(rule).items()
    }
    values = {**values_of(algorithm), **values_of(optimizer), **adjusted, **vars(options)}
    if options.distributed_after_epochs is not None:  # else the warm start would be given twice
        values["distributed_after"] = None
    shown_parser = parser(options.algorithm, options.optimizer)
    return config_text(shown_parser, values, heading=heading, whole=whole, only=only)


def given_as_config(arguments: Sequence[str], *, heading: Sequence[str] = ()) -> str:
    """Return arguments as a file with only the options that the arguments set. Local.

    Args:
        arguments: options of train.py, as on the command line.
        heading: see `config_text`.

    Raises:
        UserError: an argument is wrong.
    """
    flags = {argument.partition("=")[0] for argument in arguments}
    only = {
        option.dest for option in settable(parser()) if flags.intersection(option.option_strings)
    }
    return described_as_config(*read(arguments), heading=heading, whole=True, only=only)


def adjustment_rules(options: argparse.Namespace) -> dict[str, Any]:
    """Return the requested rules for adjusting training, by name. Local."""
    rules = {
        name: build(name, {name: kind}, options)
        for name, kind in ADJUSTMENTS.items()
        if getattr(options, name)
    }
    return rules | {"not_finite": build("not_finite", {"not_finite": NotFinitePolicy}, options)}


def _require_use(options: argparse.Namespace) -> None:
    """Raise a UserError if an option has no effect.

    Algorithm and optimizer check their own options.
    """
    saves = options.checkpoint_every > 0 or options.checkpoint_every_s is not None
    cuda = options.device == "cuda"
    require_use("project", options.project, None, options.tracker is not None, "--tracker")
    require_use("keep", options.keep, KEEP, saves, "--checkpoint-every N")
    require_use("cuda_aware", options.cuda_aware, False, cuda, "--device cuda")
    require_data_options(options)
    require_model_options(options)
    for name, kind in ADJUSTMENTS.items():
        for option in all_options(kind):
            given, needs = getattr(options, option.name, None), f"--{name.replace('_', '-')}"
            require_use(option.name, given, None, getattr(options, name), needs)
