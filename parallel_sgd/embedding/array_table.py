"""What an array of the user's own that lies on servers is to be like: the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..errors import UserError
from ..optimizers import Optimizer
from ..validation import integer, number, set_validated, shown
from .options import MOST_WIDTH, check_name, check_optimizer

BLOCK = 1024  #: values of an array of one dimension that lie together


@dataclass(frozen=True, kw_only=True)
class ArrayTable:
    """Options of an array of float32 that all workers read and add to, by rows or as a whole.

    Its rows are shared among the servers by a hash of their numbers (of an array of one dimension,
    blocks of 1024 values). A row takes memory from its first change on.

    Args:
        name: of the table, not empty; no other has it.
        shape: of the array, one or more numbers of at least 1.
        optimizer: of what is added, which then is a gradient: an SGD, Adagrad or Adam, for every
            row by itself. None: what is added is added.
        seed: of the initial values.
        initial_scale: values begin uniform in (-initial_scale, initial_scale); 0: with zeros.
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
        if math.prod(shape[1:]) > MOST_WIDTH:
            raise UserError(
                f"shape={shape} of table {name!r} must have at most {MOST_WIDTH} values in a row"
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
        """Values of the array."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Values that lie together: of a row; of one dimension those of a block."""
        if len(self.shape) == 1:
            return min(BLOCK, self.size)
        return math.prod(self.shape[1:])

    @property
    def rows(self) -> int:
        """How many rows, or blocks, there are; the last block may be longer than the array."""
        return -(-self.size // self.width)
