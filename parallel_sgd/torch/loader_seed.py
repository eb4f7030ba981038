"""Random generators around a DataLoader's own draw: each epoch counts as a single draw.

As a pass begins, a DataLoader draws a number from the default generator, to seed its workers.
Dropout draws from the same generator, so training depends on the number of passes: a run resumed
within an epoch begins an extra pass. Persistent workers draw only in the first pass. This module
makes each epoch count as a single draw, however many passes draw in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class LoaderSeed:
    """Follow PyTorch's generators from the beginning of a pass to its first minibatch.

    Args:
        generators: the generators that training draws from.

    Local. Cost: copies of the generators' states, 5 KB on the CPU, per pass.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._generators = list(generators)
        self._before: list[torch.Tensor] = []
        self._latest: list[torch.Tensor] = []

    def begin(self) -> None:
        """Record the generators at the beginning of a pass, before the DataLoader draws. A
        DataLoader with workers begins two passes each time, and asks only the second for
        minibatches. Local.
        """
        now = [generator.get_state() for generator in self._generators]
        if not self._before or not all(map(self._is_due, range(len(now)))):
            self._before = now
        self._latest = now

    def settle(self, *, counted: bool) -> None:
        """Set each generator as if the epoch had drawn exactly once, before the first minibatch.

        A generator from which the program has drawn in the meantime is not changed. Local.

        Args:
            counted: whether the present epoch's draw has already been made.
        """
        for place, generator in enumerate(self._generators):
            if self._before and self._is_due(place):
                before = self._before[place]
                generator.set_state(before if counted else _after_one_number(generator, before))
        self._before = []

    def _is_due(self, place: int) -> bool:
        """Return whether only a DataLoader has drawn from a generator since the pass began."""
        generator, latest = self._generators[place], self._latest[place]
        now = generator.get_state()
        drawn = _after_one_number(generator, latest)
        return bool(torch.equal(now, latest) or torch.equal(now, drawn))


def _after_one_number(generator: torch.Generator, state: torch.Tensor) -> torch.Tensor:
    """Return a generator's state after the single draw of a `DataLoader`."""
    other = torch.Generator(generator.device)
    other.set_state(state)
    torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=other)
    return other.get_state()
