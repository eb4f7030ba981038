"""One minibatch ahead: to know the next one while this one is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import TypeVar, cast

Item = TypeVar("Item")


def with_next(items: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Yield each item together with the one that follows it, None after the last.

    Takes one item more than it has yielded, so that its rows can be pulled meanwhile. Local.

    >>> list(with_next("abc"))
    [('a', 'b'), ('b', 'c'), ('c', None)]
    """
    yield from cast(Iterator[tuple[Item, Item | None]], pairwise(chain(items, [None])))
