"""The most memory of a rank, for every contender in new processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from .conductor import Conductor
from .contenders import CONTENDERS, side
from .step_times import LR, WARM_UP
from .tasks import SMALL


@dataclass(frozen=True)
class Memory:
    """
    Attributes:
        model, contender: of the measurement.
        before_bytes: before the model was made, but after training a small model by the same
            contender: Python, PyTorch, MPI, gloo, and the kernels.
        peak_bytes: the maximum during some steps. Both of the rank with the most.
    """

    model: str
    contender: str
    before_bytes: int
    peak_bytes: int

    @property
    def added_bytes(self) -> int:
        """Memory of the model, its training and its exchange."""
        return self.peak_bytes - self.before_bytes


def measure_memory(
    playing: Callable[[list[str]], AbstractContextManager[Conductor]],
    model: str,
    names: Iterable[str],
) -> list[Memory]:
    """Measure each contender.

    Args:
        playing: starts the sides of contenders, for a `with` block.
    """
    found = []
    for name in names:
        with playing([name]) as conductor:
            who = side(name)
            count = max(2 * WARM_UP, CONTENDERS[name].period)
            conductor.all(who, "begin", contender=name, task=SMALL, lr=LR)
            conductor.all(who, "steps", count=count)
            conductor.all(who, "end")
            before = conductor.all(who, "memory")
            conductor.all(who, "begin", contender=name, task=model, lr=LR)
            after = conductor.all(who, "steps", count=count)
            conductor.all(who, "end")
        had = max(answer["bytes"] for answer in before)
        found.append(Memory(model, name, had, max(answer["peak_bytes"] for answer in after)))
    return found
