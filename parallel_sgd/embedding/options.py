"""What a distributed embedding table is to be like: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..optimizers import SGD, Adagrad, Adam, Optimizer
from ..validation import integer, number, set_validated, shown

__all__ = ["MOST_WIDTH", "Embedding", "check_name", "check_optimizer"]

MOST_WIDTH = 2**20  #: values of a row


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Options of a table: rows of `width` float32, found by ids, each any int64.

    A row begins with its first push (see `entry_count`); reading one that does not exist yields
    its initial values and creates nothing, so that evaluation takes no memory.

    Args:
        name: of the table, not empty.
        width: values in a row.
        optimizer: an SGD, Adagrad or Adam; every row has its own state, and with Adam its own
            number of steps.
        seed: of the initial values, which depend on nothing but seed, id and column.
        initial_scale: rows begin uniform in (-initial_scale, initial_scale); 0: with zeros.
        entry_count: an id gets a row with its so-many-th push. Pushes before that one are counted
            and dropped.
        evict_after: rows that were not pushed for so many samples are forgotten, and so are counts;
            None: never. The clock is that of the table's part on a server: samples of pushes there.
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
            width=integer("width", self.width, 1, MOST_WIDTH),
            seed=integer("seed", self.seed, 0),
            initial_scale=number("initial_scale", self.initial_scale, 0),
            entry_count=integer("entry_count", self.entry_count, 1),
            evict_after=None if after is None else integer("evict_after", after, 1),
        )


def check_name(name: Any) -> str:
    """A table's name as a plain text; raises a UserError where it is none."""
    if not isinstance(name, str) or not name:
        raise UserError(f"name={shown(name)} must be a text that is not empty")
    return str(name)


def check_optimizer(optimizer: Any, of: str) -> None:
    """Refuse what no row can be trained by.

    Args:
        of: which table, in words.
    """
    if type(optimizer) not in (SGD, Adagrad, Adam):
        kind = optimizer
        text = type(kind).__name__ if isinstance(kind, Optimizer) else shown(kind)
        raise UserError(f"optimizer={text} of {of} must be an SGD, an Adagrad or an Adam")
