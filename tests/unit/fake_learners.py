"""Learners of ranks that agree, as sources see them, and samples by number."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from parallel_sgd.errors import SharedError


@dataclass
class Comm:
    """One of ranks that agree; what they do where they don't is in tests/parallel."""

    rank: int = 0
    size: int = 1
    agreed: list = field(default_factory=list)
    lengths: list | None = None  #: samples of each rank, where they have data of their own
    fault_tolerant: bool = False

    @property
    def world_ranks(self):
        return range(self.size)

    def allgather_object(self, item):
        return self.lengths or [item] * self.size

    def require_agreement(self, facts):
        self.agreed.append(facts)

    def raise_together(self, problem):
        if problem:
            raise SharedError(problem)


@dataclass
class Learner:
    comm: Comm = field(default_factory=Comm)
    distributed: bool = True
    samples: int = 0
    expected: tuple | None = None
    may_roll_back: bool = False

    def dealing(self, shares):
        return nullcontext(None)

    def announce(self, samples, total):
        self.expected = samples, total

    def feed(self):
        return nullcontext(self)

    def repeated(self, function):
        return function()

    def fail(self, problem):
        raise SharedError(f"all know: {problem}")


def numbered(samples):
    """Samples that are their own index, x and y alike."""
    y = np.arange(samples)
    return np.stack([y, -y], 1).astype(np.float64).reshape(samples, 2), y
