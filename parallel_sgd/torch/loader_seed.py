"""The number that a DataLoader draws as a pass over it begins, and what that does to training.

The number seeds the DataLoader's workers. It comes from the generator that dropout draws from, so
training depends on how often passes begin: a run that is resumed in the midst of an epoch begins
one pass more than a run that was never stopped. And with workers that persist only the first pass
draws. Here each epoch counts as one such number, however many passes draw one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class LoaderSeed:
    """Follows PyTorch's generators from the beginning of a pass to its first minibatch.

    Args:
        generators: those that training draws from.

    Local. Cost: copies of their states, 5 KB on the CPU, for each pass.
    """

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._generators = list(generators)
        self._before: list[torch.Tensor] = []
        self._latest: list[torch.Tensor] = []

    def begin(self) -> None:
        """A pass begins, before the DataLoader draws. One with workers begins two for each: only
        the second one is asked for minibatches. Local."""
        now = [generator.get_state() for generator in self._generators]
        if not self._before or not all(map(self._is_due, range(len(now)))):
            self._before = now
        self._latest = now

    def settle(self, *, counted: bool) -> None:
        """The first minibatch is asked for: make the generators what one number for each epoch
        makes of them. A generator from which the program has drawn since stays as it is. Local.

        Args:
            counted: whether the number of the present epoch was drawn before.
        """
        for place, generator in enumerate(self._generators):
            if self._before and self._is_due(place):
                before = self._before[place]
                generator.set_state(before if counted else _after_one_number(generator, before))
        self._before = []

    def _is_due(self, place: int) -> bool:
        """Whether nothing but a DataLoader has drawn from a generator since a pass has begun."""
        generator, latest = self._generators[place], self._latest[place]
        now = generator.get_state()
        drawn = _after_one_number(generator, latest)
        return bool(torch.equal(now, latest) or torch.equal(now, drawn))


def _after_one_number(generator: torch.Generator, state: torch.Tensor) -> torch.Tensor:
    """The state of such a generator after what `DataLoader` draws."""
    other = torch.Generator(generator.device)
    other.set_state(state)
    torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=other)
    return other.get_state()
