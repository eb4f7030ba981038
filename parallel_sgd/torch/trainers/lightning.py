"""Lightning's strategy with compressed gradients, for `lightning` and for `pytorch_lightning`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ...algorithms import Algorithm
from ...errors import UserError
from ...exchange import ExchangeOptions
from ...options import all_options, require_options
from ...validation import choice, shown

PACKAGES = ("lightning", "pytorch_lightning")


OF_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
OF_LEARNER = (
    *("reduction", "clip_norm", "buffers", "sync_perf_stats", "not_finite", "most_skipped"),
    "compare_every",
)


def LightningStrategy(
    *,
    algorithm: Algorithm[Any] | None = None,
    samples: Callable[[Any], int] | None = None,
    timeout_s: float | None = None,
    package: str | None = None,
    **arguments: Any,
) -> Any:
    """Return a strategy for Lightning's Trainer: a DDPStrategy with compressed gradients, or with
    an algorithm of `parallel_sgd`.

        Trainer(strategy=psgd.torch.LightningStrategy(gradient_bits=4))
        Trainer(strategy=psgd.torch.LightningStrategy(algorithm=psgd.DiLoCo(sync_steps=100)))

    Args:
        algorithm: how the ranks train together; None: DDP exchanges compressed gradients.
        samples: only with an algorithm: maps a batch to its number of samples. None: the length of
            the first axis.
        timeout_s: longest wait for other ranks, in seconds; default: see
            `Communicator.of_process_group`.
        package: "lightning" or "pytorch_lightning", whichever has the Trainer. None: the imported
            one.
        arguments: arguments of Lightning's DDPStrategy. Without an algorithm also the options of
            `compress`, such as gradient_bits=4, and arguments of DistributedDataParallel, such as
            find_unused_parameters=True. With an algorithm also arguments of `Learner`: reduction,
            clip_norm, buffers, sync_perf_stats, not_finite, most_skipped, compare_every. The
            GradScaler is that of Lightning's precision plugin.
    Raises:
        UserError: an argument is unknown or invalid, both packages are imported, or none is
            installed.

    Without an algorithm, the strategy's `handle` is the state of the exchange, as returned by
    `compress`. Gradients are also compressed on the CPU, where Lightning ignores its own
    `ddp_comm_hook`. Checkpoints hold the residuals of all ranks. With as many ranks as saved, a
    resumed training repeats the uninterrupted one bit for bit if DDP has the same buckets, as with
    find_unused_parameters=True. On another number of ranks the sum of all residuals stays the same.
    Memory: while a checkpoint is saved, rank 0 holds the residuals of all ranks.

    With an algorithm there is no DDP: the strategy's `learner` takes the steps of the optimizer, of
    which there must be one. Validation and checkpoints have the common model of all ranks. The
    learner's state is in a folder beside each checkpoint, with ".parallel_sgd" after its name. Each
    fit begins the algorithm anew, except from a checkpoint.
    """
    strategies = import_module(f".of_{_package(package)}", __package__)
    base = strategies.GradientStrategy.__mro__[2]
    known = {*inspect.signature(base.__init__).parameters} - {"self", "kwargs"}
    for name in OF_HOOKS:
        if arguments.get(name) is not None:
            raise UserError(f"LightningStrategy: {name} must not be given: the exchange is ours")
    if algorithm is None:
        if samples is not None:
            raise UserError("LightningStrategy: samples= is only for algorithm=")
        exchange = {option.name for option in all_options(ExchangeOptions)} & arguments.keys()
        known |= {*inspect.signature(DistributedDataParallel.__init__).parameters}
        require_options("LightningStrategy", ExchangeOptions, arguments.keys() - known)
        options = {name: arguments.pop(name) for name in exchange}
        ExchangeOptions(**options)  # an invalid option is an error here, not in `fit`
        return strategies.GradientStrategy(exchange=options, timeout_s=timeout_s, **arguments)
    if not isinstance(algorithm, Algorithm):
        raise UserError(
            f"algorithm={shown(algorithm)} must be an algorithm, such as psgd.DiLoCo(...)"
        )
    for name in sorted(arguments.keys() - known - {*OF_LEARNER}):
        raise UserError(
            f"LightningStrategy(algorithm=...) has no argument {name!r}: options of the exchange "
            "are the algorithm's, and there is no DistributedDataParallel. It has "
            f"{', '.join(OF_LEARNER)}, and the arguments of DDPStrategy"
        )
    options = {name: arguments.pop(name) for name in OF_LEARNER if name in arguments}
    return strategies.LearnerStrategy(
        algorithm=algorithm,
        samples=samples,
        timeout_s=timeout_s,
        options=options,
        batch_size_of=strategies.batch_size_of,
        **arguments,
    )


def _package(given: str | None) -> str:
    """Return the name of Lightning's package."""
    if given is not None:
        return choice("package", given, PACKAGES)
    imported = [name for name in PACKAGES if name in sys.modules]
    if len(imported) == 2:
        raise UserError(
            "LightningStrategy: both lightning and pytorch_lightning are imported: give "
            "package='lightning' or package='pytorch_lightning', whichever has the Trainer"
        )
    installed = [name for name in PACKAGES if find_spec(name)]
    return (imported + installed + ["lightning"])[0]
