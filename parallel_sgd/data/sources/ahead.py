"""Look-ahead over minibatches, to start work on the next while training on the current."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import TypeVar, cast

Item = TypeVar("Item")


def with_next(items: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Yield each item together with its successor, None after the last.

    Reads one item ahead, so that embedding rows for the next minibatch can be pulled during a step.
    Local.

    >>> list(with_next("abc"))
    [('a', 'b'), ('b', 'c'), ('c', None)]
    """
    yield from cast(Iterator[tuple[Item, Item | None]], pairwise(chain(items, [None])))
