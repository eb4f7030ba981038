"""The conformance suite: all checks of an algorithm, built in or yours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..algorithms import Algorithm
from ..communication import Communicator, RankFailed, checked_timeout, simulate
from ..errors import UserError
from ..optimizers import SGD, Optimizer
from ..options import all_options
from ..validation import function, instance, integer, mapping, shown
from . import conduct, contract, failures, identities, learning, reshard_rules
from .cases import Case
from .registry import Check

CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        contract.options,
        contract.state,
        contract.arrays,
        contract.bytes_sent,
        identities.serial,
        identities.identical,
        identities.permuted,
        identities.communication,
        identities.weights,
        identities.float64,
        learning.learns,
        learning.owed,
        learning.later,
        learning.approach,
        learning.dry_ranks_count_nothing,
        conduct.agreement,
        conduct.announced,
        conduct.nothing,
        conduct.dry_ranks,
        conduct.repeatable,
        conduct.orders,
        conduct.rates,
        conduct.observed,
        conduct.resume,
        reshard_rules.same_state,
        reshard_rules.resharded,
        reshard_rules.merged,
        reshard_rules.later_resharded,
        failures.errors,
    )
}
"""The checks of `check_algorithm`, by name."""

EXCUSES = (
    "  (if the algorithm cannot promise this, give exceptions={'check': 'reason'}, one_rank or "
    "full_precision)"
)


def check_algorithm(
    algorithm: Algorithm[Any],
    *,
    optimizer: Optimizer | None = None,
    ranks: Sequence[int] = (1, 2, 3, 4),
    comm: Communicator | None = None,
    only: str | Iterable[str] | None = None,
    exceptions: Mapping[str, str] | None = None,
    full_precision: Algorithm[Any] | None = None,
    one_rank: Callable[[int], Algorithm[Any]] | None = None,
    schedules: int = 200,
    timeout_s: float = 20.0,
) -> dict[str, str]:
    """Run the conformance suite on an algorithm: raises unless every check passes.

    The ranks train a small model with 1243 values for 10 minibatches of 1 to 4 samples a rank, with
    different data on every rank. Give the algorithm periods that end several times in such a run.

    An algorithm need not pass every check: name the exceptions. Checks that compare two runs to
    rounding run the algorithm in full precision.

    Args:
        algorithm: the algorithm with the options to check.
        optimizer: the local update rule. None: SGD(lr=0.1).
        ranks: numbers of threads, each checked in turn.
        comm: check on these ranks instead of threads; all ranks call this function. An algorithm
            that lets ranks wait ends the job after the communicator's own timeout, so begin with
            threads.
        only: a name from `CHECKS`, or several. None: all.
        exceptions: names of checks that this algorithm does not pass by its nature, each with the
            reason. Such a check must fail: an unnecessary exception is an error, too.
        full_precision: the same algorithm without loss in messages. None: the algorithm with
            gradient_bits=32, if it has this option.
        one_rank: given a number of ranks, returns the algorithm that does on one rank what this
            algorithm does on this many ranks with the same data. None: the same algorithm. For
            options whose meaning depends on the number of ranks, such as a period in samples of all
            ranks.
        schedules: number of orders of the ranks' steps in the check "orders" (`explore`).
        timeout_s: longest wait of a thread for other threads.
    Returns:
        The outcome of every check, by name, in a few words.
    Raises:
        AssertionError: on all ranks of `comm`, if checks fail. Names each failed check, the number
            of ranks, the difference and its step, and the identity that does not hold.
        UserError: an argument is not as required, or a name is not a check's.

    Collective with `comm`, else local. Cost: a few hundred steps for each number of ranks, most of
    a second, and some 10 ms for each of the schedules.

    >>> import parallel_sgd as psgd
    >>> algorithm = psgd.ModelAveragingSGD(sync_steps=3)
    >>> check_algorithm(algorithm, ranks=(1, 2), only=["serial", "identical"])
    {'serial': 'passed', 'identical': 'passed on 2 ranks'}
    """
    instance("algorithm", algorithm, Algorithm, "DataParallelSGD()")
    if full_precision is not None:
        instance("full_precision", full_precision, Algorithm, "DataParallelSGD()")
    if optimizer is not None:
        instance("optimizer", optimizer, Optimizer, "SGD(lr=0.1)")
    if comm is not None:
        instance("comm", comm, Communicator, "Communicator.world()")
    if one_rank is not None:
        function("one_rank", one_rank, "of a number of ranks")
    if not isinstance(ranks, Sequence) or isinstance(ranks, str | bytes):
        raise UserError(f"ranks={shown(ranks)} must be several numbers, such as (1, 2)")
    ranks = [integer(f"ranks[{i}]", size, 1) for i, size in enumerate(ranks)]
    schedules = integer("schedules", schedules, 1)
    timeout_s, excused = checked_timeout(timeout_s), mapping("exceptions", exceptions, "reasons")
    if not isinstance(only, Iterable | None):
        raise UserError(f"only={shown(only)} must be names of checks")
    names = [only] if isinstance(only, str) else list(CHECKS if only is None else only)
    for name in [*names, *excused]:
        if name not in CHECKS:
            raise UserError(f"{name!r} must be a check: one of {', '.join(CHECKS)}")
    exact = full_precision or _full_precision(algorithm)

    def case(comm: Communicator) -> Case:
        return Case(
            algorithm=algorithm,
            exact=exact,
            one_rank=_full_precision(one_rank(comm.size)) if one_rank else exact,
            optimizer=optimizer or SGD(lr=0.1),
            comm=comm,
            schedules=schedules,
            dtype="float32" if "float64" in excused else "float64",
            timeout_s=timeout_s,
        )

    outcomes, failures = {}, list[str]()
    names_by_problem: dict[str, list[str]] = {}  # names of checks, by problem
    cause: BaseException | None = None
    for name in names:
        check = CHECKS[name]
        sizes = [comm.size] if comm else [1] if check.alone else list(ranks)
        sizes = [size for size in sizes if size >= check.least_ranks]
        sizes = [max(sizes)] if check.largest and sizes else sizes
        problems = [_problem(check, case, size, comm, timeout_s) for size in sizes]
        first = next(filter(None, problems), None)
        if first and name not in excused:
            text, error, size = first
            cause = cause or error
            names_by_problem.setdefault(text, []).append(name)
            if names_by_problem[text] == [name]:
                where = f"{name}, on {_worlds([size])}"
                failures.append(f"{where}: {text}\n  must hold: {check.identity}")
        if sizes and not first and name in excused:
            failures.append(
                f"{name} passes on {_worlds(sizes)}: remove its exception ({excused[name]})"
            )
        outcomes[name] = _outcome(check, sizes, excused.get(name))
    failures += [
        f"{', '.join(same[1:])}: as {same[0]}" for same in names_by_problem.values() if same[1:]
    ]
    hint = [EXCUSES] if names_by_problem else []
    if failures:
        raise AssertionError("\n".join([*failures, f"  {algorithm}", *hint])) from cause
    return outcomes


Problem = tuple[str, "BaseException | None", int]


def _problem(
    check: Check,
    case: Callable[[Communicator], Case],
    size: int,
    comm: Communicator | None,
    timeout_s: float,
) -> Problem | None:
    """Run a check on this many ranks.

    Returns:
        The problem in words, its exception if any, and the number of ranks; or None.
    """

    def body(comm: Communicator) -> list[str]:
        assert comm.size == size
        with np.errstate(all="ignore"):
            problem = check.body(case(comm))
        texts = enumerate(comm.allgather_object(problem))
        return [f"rank {k}: {text}" for k, text in texts if text is not None]

    try:
        texts = body(comm) if comm else simulate(size, body, timeout_s=timeout_s)[0]
    except RankFailed as error:
        return f"{error}, or has not reached the same point within {timeout_s:g} s", error, size
    except Exception as error:
        return f"{type(error).__name__}: {error}", error, size
    return (texts[0], None, size) if texts else None


def _outcome(check: Check, sizes: Sequence[int], reason: str | None) -> str:
    if not sizes:
        return f"needs {check.least_ranks} ranks"
    if reason is not None:
        return f"exception: {reason}"
    return "passed" if check.alone else f"passed on {_worlds(sizes)}"


def _worlds(sizes: Sequence[int]) -> str:
    """Return "1 rank", or "2, 3, 4 ranks", say."""
    return ", ".join(map(str, sizes)) + (" rank" if list(sizes) == [1] else " ranks")


def _full_precision(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """Return the same algorithm in full precision, by the bits option of built-in algorithms."""
    if getattr(algorithm, "gradient_bits", 32) == 32 and not getattr(algorithm, "bits_of", None):
        return algorithm
    given = {option.name: option.field.default for option in all_options(type(algorithm))}
    of_few_bits = (
        *("code", "block_size", "threshold", "half_format"),
        *("error_feedback", "residual_decay", "bits_of"),
    )
    usual = {name: given[name] for name in of_few_bits if name in given}
    option: dict[str, Any] = {**usual, "gradient_bits": 32}
    return replace(algorithm, **option)
