"""Faults that the tests must notice: what is replaced, by what, and which checks see it.

The checks are those of `test_mutations`, by name.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CODECS

import parallel_sgd
from parallel_sgd import Algorithm, Communicator, DataParallelSGD
from parallel_sgd.algorithms import ExchangeState
from parallel_sgd.communication import ThreadCommunicator
from parallel_sgd.compression import EntropyCoded
from parallel_sgd.exchange import Exchange

STATING = [
    "invariants",
    "learners",
    "local_updates",
    "low_rank",
    "skipped",
    "hosts",
    "served_identities",
    "served_training",
]
LOSSY = [name for name in CODECS if name != "32 bits"]
CONSERVATION = [f"conservation, {name}" for name in LOSSY]
TWO_STAGES = [f"two stages, {name}" for name in LOSSY]


@dataclass(frozen=True)
class Mutation:
    """A fault, and the checks that must notice it.

    Args:
        target, name: the function or property that is replaced.
        wrong: takes its place; called with what was there, and then with the arguments of the call.
    """

    fault: str
    target: Any
    name: str
    wrong: Callable[..., Any]
    killed_by: list[str]

    def __str__(self) -> str:
        return f"{self.fault}, {self.name}"


@contextmanager
def broken(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a fault in the package, what must fail, in a module that states what must hold."""
    right = getattr(mutation.target, mutation.name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        return mutation.wrong(right, *arguments, **options)

    replacement = property(wrong) if isinstance(right, property) else wrong
    monkeypatch.setattr(mutation.target, mutation.name, replacement)
    errors = (AssertionError, pytest.fail.Exception)
    with pytest.raises(errors) as caught, np.errstate(all="ignore"):
        yield
    here, package = Path(__file__).parent, Path(parallel_sgd.__file__).parent
    files = [Path(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__)]
    ours = [file for file in files if here in file.parents or package in file.parents]
    assert ours[-1] in [here / f"{name}.py" for name in STATING], "noticed by the package or patch"


def nothing(right, *_, **__):
    """It is not called."""


def keeps_old(which, right, self, vector, residuals, **part):
    old = residual(residuals, which).copy()
    right(self, vector, residuals, **part)
    residual(residuals, which)[:] = old


def resets(which, right, self, vector, residuals, **part):
    right(self, vector, residuals, **part)
    residual(residuals, which).fill(0)


def residual(residuals, which):
    return residuals.worker_error if which == "worker" else residuals.owner_error["0"]


def negates(right, self, vector, *residuals, **part):
    right(self, vector, *residuals, **part)
    np.negative(vector, out=vector)


def only_own_parts_arrive(right, self, send, send_counts, receive, counts, **options):
    begin = sum(send_counts[: self.rank])
    receive[:] = np.tile(send[begin : begin + send_counts[self.rank]], self.size)


def only_own_part_is_kept(right, self, send, receive, counts):
    right(self, send, others := receive.copy(), counts)
    begin = sum(counts[: self.rank])
    receive[begin : begin + len(send)] = others[begin : begin + len(send)]


def last_rank_first(right, self, send, send_counts, receive, counts, **options):
    right(self, send, send_counts, receive, counts)
    receive[:] = receive.reshape(self.size, -1)[::-1].ravel()


@dataclass
class Instead:
    """An optimizer at work, in whose place `change(optimizer, gradient, samples)` is called."""

    optimizer: Any
    change: Callable[[Any, Any, int], None]

    def __call__(self, gradient: Any, samples: int) -> None:
        self.change(self.optimizer, gradient, samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def clears_what_is_not_sent(right, self, blocks, vector, residual, payload, step):
    length = right(self, blocks, vector, residual, payload, step)
    self.decode(blocks, payload, sent := np.empty_like(residual), add=False)
    residual[sent == 0] = 0
    return length


def forgets_when_bits_change(right, self, bits):
    right(self, bits)
    self.residuals.worker_error.fill(0)


def exchanges_before_it_checks(right, self, state, work, samples):
    state.exchange.sum(work.gradient.flat.copy())
    return right(self, state, work, samples)


def without_buffers(right, self, state, work):
    work.comm.broadcast(work.parameters.flat)


def sums_samples_only(right, self, problem, samples, **_):
    return int(self.sum_integers(np.array([samples]))[0])


AS_IN_FULL = ["order", "serial"]

MUTATIONS = [
    Mutation("no exchange", Exchange, "sum", nothing, [*AS_IN_FULL, *CONSERVATION, *TWO_STAGES]),
    Mutation(
        "nothing from others", ThreadCommunicator, "alltoall", only_own_parts_arrive, CONSERVATION
    ),
    Mutation("nothing back", ThreadCommunicator, "allgather", only_own_part_is_kept, CONSERVATION),
    Mutation("flipped sign", Exchange, "sum", negates, [*AS_IN_FULL, *CONSERVATION, *TWO_STAGES]),
    *(
        Mutation(f"{which} error {what}", Exchange, "sum", partial(wrong, which), checks)
        for what, wrong, checks in (
            ("not updated", keeps_old, CONSERVATION),
            ("reset", resets, [*CONSERVATION, *TWO_STAGES]),
        )
        for which in ("worker", "owner")
    ),
    Mutation(
        "rank order changed",
        ThreadCommunicator,
        "alltoall",
        last_rank_first,
        ["order", "two stages, 32 bits", "two stages, 1 bit", "two stages, 8 bits"],
    ),
    Mutation(
        "residual reset as bits change",
        ExchangeState,
        "_replace",
        forgets_when_bits_change,
        ["changing bits"],
    ),
    Mutation(
        "residual cleared where nothing was sent",
        EntropyCoded,
        "encode",
        clears_what_is_not_sent,
        ["conservation, entropy code"],
    ),
    Mutation(
        "no common model at the start",
        ThreadCommunicator,
        "broadcast",
        nothing,
        ["serial", "equations, averaging, block", "warm start"],
    ),
    Mutation(
        "only parameters made equal after a warm start",
        Algorithm,
        "end_warm_start",
        without_buffers,
        ["warm start"],
    ),
    Mutation(
        "a gradient is not looked at",
        Communicator,
        "agree",
        sums_samples_only,
        ["bad gradient", "large gradient"],
    ),
    Mutation(
        "exchanged before looked at",
        DataParallelSGD,
        "problem",
        exchanges_before_it_checks,
        ["bad gradient"],
    ),
]
