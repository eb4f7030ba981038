"""An algorithm at work on one model: what a learner asks it, and the parts of its state."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from ..algorithms import Algorithm, Minibatch, Work
from ..errors import SharedError
from ..state import Component, External, components
from .warm_start import in_warm_start, train_alone

Result = TypeVar("Result")

minibatch_of = lru_cache(maxsize=64)(Minibatch)  #: found sooner than made: sizes repeat


class AlgorithmRunner:
    """
    Args:
        algorithm: with its options.
        work: what it works with.

    Attributes:
        state: the algorithm's.
        failed: whether training has ended for all ranks, servers too, by an error.

    Creation is collective.
    """

    def __init__(self, algorithm: Algorithm[Any], work: Work) -> None:
        self.algorithm, self.work, self.group = algorithm, work, work.group
        self.state = algorithm.init(work)
        self.failed = False

    @property
    def components(self) -> list[Component]:
        """Those of the algorithm's state. Local."""
        return [component for _, component in components(self.state)]

    @property
    def external(self) -> list[External]:
        """Those of which other ranks keep a part. Local."""
        return [component for component in self.components if isinstance(component, External)]

    @property
    def bytes_sent(self) -> int:
        """By this rank to others so far. Local."""
        return sum(component.bytes_sent for component in self.components)

    def report(self) -> dict[str, Any] | None:
        """What the components can tell; None where they have nothing to tell. Local."""
        report = self.work.skipped.report()
        for component in self.components:
            report |= component.report() or {}
        return report or None

    def common_model(self) -> Any:
        """The model [n] that all ranks have in common. Local, no copy."""
        return self.algorithm.shared_model(self.state, self.work)

    def ready(self, name: str) -> None:
        """The gradient of one parameter is complete. Local."""
        self.algorithm.ready(self.state, self.work, name)

    def train(self, samples: int, announced_total: int | None) -> int:
        """Train on one minibatch. Collective.

        Args:
            samples: of this rank in it.
            announced_total: of all ranks, where they are announced.
        Returns:
            The samples of all ranks, as far as this one knows.
        """
        algorithm, state, work = self.algorithm, self.state, self.work
        if in_warm_start(algorithm, work):
            return train_alone(algorithm, state, work, samples)
        if algorithm.synchronizes_every_step:
            problem = work.skipped.problem(algorithm.problem(state, work, samples))
            total = self._together(self.group.agree, problem, samples)
        elif announced_total is not None:
            total = announced_total
        elif algorithm.asynchronous:
            total = samples * self.group.own.size
        else:
            total = self._together(self.group.agree, None, samples)
        if total:
            algorithm.step(state, work, minibatch_of(samples, total))
        return total

    def agree(self, number: int) -> int:
        """The sum of a number over the ranks that train. Collective.

        Raises:
            SharedError: a rank has failed.
        """
        return self._together(self.group.agree, None, number)

    def skip(self, samples: int, announced_total: int | None) -> int:
        """Leave a minibatch out, on all ranks: the state stays as it is, and the clock goes on.
        Collective; as `train`, for algorithms that synchronize in every step, and in a warm
        start."""
        if in_warm_start(self.algorithm, self.work):
            return train_alone(self.algorithm, self.state, self.work, samples, skip=True)
        self.work.skipped.problem(None)  # it is not trained on anyway
        total = self.agree(samples)
        self.work.optimizer(self.work.gradient.flat, 0, total)
        return total

    def _together(self, wait: Callable[..., Result], *arguments: Any) -> Result:
        """Wait for all ranks; where training ends for all, what is under way comes to its end."""
        try:
            return wait(*arguments)
        except SharedError:
            self.failed = True
            for component in self.components:
                component.drain()
            raise

    def fail(self, problem: str) -> NoReturn:
        """End training for a problem of this rank. Raises a SharedError."""
        self._together(self.group.fail, problem)
        raise AssertionError("unreachable")

    def meet(self) -> None:
        """Find out whether a rank has failed. Collective."""
        self._together(self.group.meet)

    def finish(self) -> None:
        """Complete what is under way; or serve, until the others have. Collective."""
        if self.group.serves:
            self.group.serve()
            return
        try:
            self._together(self.group.meet_to_finish)
        except SharedError:
            x, shared = self.work.parameters.flat, self.common_model()
            if shared is not x:  # this rank's own model may not be finite
                x[...] = shared
            raise
        self.algorithm.finish(self.state, self.work)

    def abandon(self) -> None:
        """Ranks have died: see `Component.abandon`. Local."""
        for component in self.components:
            component.abandon()

    def close(self, *, failed: bool) -> None:
        """Give back what was taken beside memory: see `Component.close`. Collective."""
        for component in self.components:
            component.close(failed=failed)
