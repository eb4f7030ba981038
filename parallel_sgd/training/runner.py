"""The algorithm runner: runs an algorithm on one model, and asks the components of its state."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from ..algorithms import Algorithm, Minibatch, Work
from ..compression import problem_with
from ..errors import NotFinite, SharedError
from ..state import Component, External, components

Result = TypeVar("Result")

minibatch_of = lru_cache(maxsize=64)(Minibatch)  #: cached because sizes repeat


class AlgorithmRunner:
    """Runs an algorithm on one model.

    Args:
        algorithm: with its options.
        work: the parameters, optimizer and ranks for the algorithm.

    Attributes:
        state: the algorithm's.
        failed: True once an error has ended training for all ranks, including servers.

    Creation is collective.
    """

    def __init__(self, algorithm: Algorithm[Any], work: Work) -> None:
        self.algorithm, self.work, self.group = algorithm, work, work.group
        self.state = algorithm.init(work)
        self.failed = False

    @property
    def components(self) -> list[Component]:
        """Components of the algorithm's state. Local."""
        return [component for _, component in components(self.state)]

    @property
    def external(self) -> list[External]:
        """Components with parts on other ranks, such as parameter servers. Local."""
        return [component for component in self.components if isinstance(component, External)]

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank so far. Local."""
        return sum(component.bytes_sent for component in self.components)

    def report(self) -> dict[str, Any] | None:
        """Return the components' statistics; None if there are none. Local."""
        report = self.work.skipped.report()
        for component in self.components:
            report |= component.report() or {}
        return report or None

    def common_model(self) -> Any:
        """Return the common model [n] of all ranks. Local, no copy."""
        return self.algorithm.shared_model(self.state, self.work)

    def ready(self, name: str) -> None:
        """Report that the gradient of one parameter is complete. Local.

        The algorithm hears of it if it exchanges gradients early (`Algorithm.overlap`), and not in
        the warm start, which exchanges nothing.
        """
        if self.algorithm.overlap and not in_warm_start(self.algorithm, self.work):
            self.algorithm.ready(self.state, self.work, name)

    def train(self, samples: int, announced_total: int | None) -> int:
        """Train on one minibatch. Collective.

        Args:
            samples: of this rank in the minibatch.
            announced_total: samples of all ranks; None without announcements.
        Returns:
            The samples of all ranks, as far as this rank knows.
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
            total = self.group.total_if_alike(samples)
        elif algorithm.has_quorum:
            self.fail(
                "quorum and grace_s need the samples of all ranks before each step: train on the "
                "minibatches of a parallel_sgd.data.Source, or call learner.announce()"
            )
        else:
            total = self._together(self.group.agree, None, samples)
        if total:
            algorithm.step(state, work, minibatch_of(samples, total))
        return total

    def agree(self, number: int) -> int:
        """Sum a number over the ranks that train. Collective.

        Raises:
            SharedError: a rank has failed.
        """
        self.arrive()
        return self._together(self.group.agree, None, number)

    def arrive(self, *, problem: bool = False) -> None:
        """Let ranks that are still in earlier steps come: see `Algorithm.arrive`. Collective."""
        self.algorithm.arrive(self.state, self.work, problem=problem)

    def skip(self, samples: int, announced_total: int | None) -> int:
        """Skip a minibatch on all ranks: the state stays the same, and the clock advances.
        Collective; as `train`, for algorithms that synchronize in every step, and in a warm start.
        """
        if in_warm_start(self.algorithm, self.work):
            return train_alone(self.algorithm, self.state, self.work, samples, skip=True)
        self.work.skipped.problem(None)  # clear it: this minibatch is not trained on
        total = self.agree(samples)
        self.work.optimizer(self.work.gradient.flat, 0, total)
        return total

    def _together(self, wait: Callable[..., Result], *arguments: Any) -> Result:
        """Wait for all ranks. If training ends for all ranks, complete pending work before the
        error."""
        try:
            return wait(*arguments)
        except SharedError:
            self.failed = True
            for component in self.components:
                component.drain()
            raise

    def fail(self, problem: str) -> NoReturn:
        """End training because of a problem of this rank. Raises a SharedError."""
        self.arrive(problem=True)
        self._together(self.group.fail, problem)
        raise AssertionError("unreachable")

    def meet(self) -> None:
        """Synchronize, and raise a SharedError if a rank has failed. Collective."""
        self.arrive()
        self._together(self.group.meet)

    def finish(self) -> None:
        """Complete pending work; on a server, serve until the workers have finished. Collective."""
        if self.group.serves:
            self.group.serve()
            return
        self.arrive()
        try:
            self._together(self.group.meet_to_finish)
        except SharedError:
            x, shared = self.work.parameters.flat, self.common_model()
            if shared is not x:  # this rank's own model may not be finite
                x[...] = shared
            raise
        self.algorithm.finish(self.state, self.work)

    def abandon(self) -> None:
        """Abandon pending work after a rank failure: see `Component.abandon`. Local."""
        for component in self.components:
            component.abandon()

    def close(self, *, failed: bool) -> None:
        """Release communicators, threads and buffers: see `Component.close`. Collective."""
        for component in self.components:
            component.close(failed=failed)


def in_warm_start(algorithm: Algorithm[Any], work: Work) -> bool:
    """Return True if the next minibatch belongs to the warm start. Local."""
    return work.optimizer.state.samples < algorithm.distributed_after


def train_alone(
    algorithm: Algorithm[Any], state: Any, work: Work, samples: int, *, skip: bool = False
) -> int:
    """Take one step of the warm start: all ranks have the same whole minibatch; nothing is
    exchanged.

    After the last step of the warm start all ranks continue from rank 0's model, because machines
    may round differently.

    Args:
        samples: of the minibatch; the same on all ranks.
        skip: skip the minibatch: only the clock advances.
    Returns:
        The samples.
    Raises:
        SharedError: a gradient is not finite, a rank has failed, or the ranks' sample counts
            differ.

    Collective.
    """
    gradient, skipped = work.gradient.flat, work.skipped
    problem = skipped.problem(None if skip else problem_with(gradient))
    if skipped.skips and not algorithm.roles.together:  # through servers this would end training
        work.comm.agree(problem if isinstance(problem, NotFinite) else None)
    work.group.agree_on_whole(problem, samples)
    if samples:
        work.optimizer(gradient, 0 if skip else samples, samples)
    if not in_warm_start(algorithm, work):
        algorithm.end_warm_start(state, work)
    return samples
