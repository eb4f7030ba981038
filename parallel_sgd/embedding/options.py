"""Options of distributed embedding tables: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..optimizers import SGD, Adagrad, Adam, Optimizer
from ..validation import integer, number, set_validated, shown

__all__ = ["MAX_WIDTH", "Embedding", "check_name", "check_optimizer"]

MAX_WIDTH = 2**20  #: largest number of values in a row


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Options of a table: rows of `width` float32, found by int64 ids of any value.

    The first push of an id creates its row (see `entry_count`). Reading a missing row returns its
    initial values and creates nothing, so evaluation takes no memory.

    Args:
        name: of the table, not empty.
        width: number of values in a row.
        optimizer: an SGD, Adagrad or Adam. Every row has its own state, and with Adam its own step
            count.
        seed: of the initial values. These depend only on seed, id and column.
        initial_scale: initial values are uniform in (-initial_scale, initial_scale). 0: zeros.
        entry_count: number of the push of an id that creates its row. Earlier pushes are counted
            and dropped.
        evict_after: number of samples without a push before a row, or a count, is evicted. None:
            never. Each server counts the samples of the pushes to its part of the table.
    """

    name: str
    width: int
    optimizer: Optimizer = Adagrad(lr=0.05)  # noqa: RUF009 - frozen
    seed: int = 0
    initial_scale: float = 0.01
    entry_count: int = 1
    evict_after: int | None = None

    def __post_init__(self) -> None:
        name = check_name(self.name)
        check_optimizer(self.optimizer, f"embedding {name!r}")
        after = self.evict_after
        set_validated(
            self,
            name=name,
            width=integer("width", self.width, 1, MAX_WIDTH),
            seed=integer("seed", self.seed, 0),
            initial_scale=number("initial_scale", self.initial_scale, 0),
            entry_count=integer("entry_count", self.entry_count, 1),
            evict_after=None if after is None else integer("evict_after", after, 1),
        )


def check_name(name: Any) -> str:
    """Return a table's name as a plain text.

    Raises:
        UserError: the name is empty or not a text.
    """
    if not isinstance(name, str) or not name:
        raise UserError(f"name={shown(name)} must be a text that is not empty")
    return str(name)


def check_optimizer(optimizer: Any, of: str) -> None:
    """Check that rows can be trained by `optimizer`.

    Args:
        of: the table, in words.
    Raises:
        UserError: the optimizer is not an SGD, Adagrad or Adam.
    """
    if type(optimizer) not in (SGD, Adagrad, Adam):
        kind = optimizer
        text = type(kind).__name__ if isinstance(kind, Optimizer) else shown(kind)
        raise UserError(f"optimizer={text} of {of} must be an SGD, an Adagrad or an Adam")
