"""Options of tables on servers: embeddings, and arrays of the user. The same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import UserError
from ..optimizers import SGD, Adagrad, Adam, Optimizer
from ..validation import integer, number, set_validated, shown

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


BLOCK = 1024  #: values in a block of an array with a single dimension


@dataclass(frozen=True, kw_only=True)
class ArrayTable:
    """Options of an array of float32 that all workers read and add to, by rows or as a whole.

    A hash of the row numbers distributes the rows over the servers. An array of a single dimension
    is distributed in blocks of 1024 values. A row takes memory from its first change on.

    Args:
        name: of the table: unique, not empty.
        shape: of the array: dimensions of at least 1.
        optimizer: an SGD, Adagrad or Adam, applied to each row by itself. Added values are then
            gradients. None: values are added.
        seed: of the initial values.
        initial_scale: initial values are uniform in (-initial_scale, initial_scale). 0: zeros.
    """

    name: str
    shape: tuple[int, ...]
    optimizer: Optimizer | None = None
    seed: int = 0
    initial_scale: float = 0.0

    entry_count: ClassVar[int] = 1
    evict_after: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        name = check_name(self.name)
        given = self.shape if isinstance(self.shape, Sequence) else (self.shape,)
        if not given or isinstance(given, str):
            raise UserError(
                f"shape={shown(self.shape)} of table {name!r} must be one or more whole numbers"
            )
        what = f"shape of table {name!r}: dimension"
        shape = tuple(integer(what, n, 1) for n in given)
        if math.prod(shape[1:]) > MAX_WIDTH:
            raise UserError(
                f"shape={shape} of table {name!r} must have at most {MAX_WIDTH} values in a row"
            )
        if self.optimizer is not None:
            check_optimizer(self.optimizer, f"table {name!r}")
        set_validated(
            self,
            name=name,
            shape=shape,
            seed=integer("seed", self.seed, 0),
            initial_scale=number("initial_scale", self.initial_scale, 0),
        )

    @property
    def size(self) -> int:
        """Number of values in the array."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Number of values in a row, or in a block if the array has a single dimension."""
        if len(self.shape) == 1:
            return min(BLOCK, self.size)
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """Number of rows, or blocks. The last block may extend beyond the array."""
        return -(-self.size // self.width)


Table = Embedding | ArrayTable  #: any table with rows on servers


class Tables:
    """An option's check: a sequence of tables with distinct names."""

    metavar, expected = "", "tables"

    def __call__(self, name: str, value: Any) -> tuple[Table, ...]:
        are = isinstance(value, Sequence) and all(isinstance(one, Table) for one in value)
        if not are:
            raise UserError(f"{name}={shown(value)} must be a sequence of Embedding or ArrayTable")
        names = [table.name for table in value]
        for table in names:
            if names.count(table) > 1:
                raise UserError(f"{name}: two of them have the name {table!r}")
        return tuple(value)

    def read(self, text: str) -> Any:
        raise ValueError(text)
