"""One minibatch ahead: to know the next one while this one is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def with_next(items: Iterable[Item]) -> Iterator[tuple[Item, Item | None]]:
    """Yield each item together with the one that follows it, None after the last.

    Takes one item more than it has yielded, so that its rows can be pulled meanwhile. Local.

    >>> list(with_next("abc"))
    [('a', 'b'), ('b', 'c'), ('c', None)]
    """
    rest = iter(items)
    for item in rest:
        for following in rest:
            yield item, following
            item = following
        yield item, None
