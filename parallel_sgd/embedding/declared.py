"""The tables declared to an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UserError
from ..validation import shown
from .array_table import ArrayTable
from .options import Embedding

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
