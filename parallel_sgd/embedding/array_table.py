"""Options of a user's array on servers: the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import UserError
from ..optimizers import Optimizer
from ..validation import integer, number, set_validated, shown
from .options import MAX_WIDTH, check_name, check_optimizer

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
