"""What a distributed embedding table is to be like: the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..optimizers import SGD, Adagrad, Adam, Optimizer
from ..validation import integer, number, set_validated, shown

__all__ = ["Embedding", "EmbeddingTables"]


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
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"name={shown(self.name)} must be a text that is not empty")
        if type(self.optimizer) not in (SGD, Adagrad, Adam):
            kind = self.optimizer
            text = type(kind).__name__ if isinstance(kind, Optimizer) else shown(kind)
            raise UserError(
                f"optimizer={text} of embedding {self.name!r} must be an SGD, an Adagrad or an Adam"
            )
        after = self.evict_after
        set_validated(
            self,
            name=str(self.name),
            width=integer("width", self.width, 1, 2**20),
            seed=integer("seed", self.seed, 0),
            initial_scale=number("initial_scale", self.initial_scale, 0),
            entry_count=integer("entry_count", self.entry_count, 1),
            evict_after=None if after is None else integer("evict_after", after, 1),
        )


class EmbeddingTables:
    """A sequence of `Embedding` of different names."""

    metavar, expected = "", "embedding tables"

    def __call__(self, name: str, value: Any) -> tuple[Embedding, ...]:
        are = isinstance(value, Sequence) and all(isinstance(one, Embedding) for one in value)
        if not are:
            raise UserError(f"{name}={shown(value)} must be a sequence of Embedding")
        names = [table.name for table in value]
        for table in names:
            if names.count(table) > 1:
                raise UserError(f"{name}: two of them have the name {table!r}")
        return tuple(value)

    def read(self, text: str) -> Any:
        raise ValueError(text)
