"""Choice of the columns for x and y in a table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import UserError
from ...validation import shown


class Header(Protocol):
    """The columns of a table file.

    Attributes:
        columns: the names of all columns.
        kinds: the selectable columns, with (dtype, width): unique names of numeric columns. The
            width is None for a number in each row.
        types: the type of each column, as text.
        indexes: the columns that are names of rows.
    """

    @property
    def path(self) -> Path: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def kinds(self) -> Mapping[str, tuple[np.dtype[Any], int | None]]: ...

    @property
    def types(self) -> Mapping[str, str]: ...

    @property
    def indexes(self) -> frozenset[str]: ...


USUAL_Y = ("y", "label", "target")


def checked_names(argument: str, names: Any, file: Header) -> tuple[str, ...]:
    """Check the columns named by the user: they exist and hold numbers.

    Returns:
        The names, also for a single name.
    Raises:
        UserError: a name is not as required.
    """
    wanted = (names,) if isinstance(names, str) else names
    if not isinstance(wanted, Sequence) or not all(isinstance(name, str) for name in wanted):
        raise UserError(
            f"{argument}={shown(names)} must be the name of a column, or a list of them"
        )
    if not wanted:
        raise UserError(f"{argument}={shown(names)} must be at least one column")
    for name in wanted:
        if name not in file.columns:
            near = difflib.get_close_matches(name, file.columns, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {shown(list(file.columns))}"
            raise UserError(f"{argument}={name!r} is not a column of {file.path}: {hint}")
        if name not in file.kinds:
            twice = file.columns.count(name) > 1
            held = "occurs twice" if twice else f"holds {file.types[name]}: must be numbers"
            raise UserError(f"{argument}={name!r} of {file.path} {held}")
        if len(wanted) > 1 and file.kinds[name][1] is not None:
            raise UserError(
                f"{argument}={shown(names)}: {name!r} of {file.path} holds lists of numbers: must "
                "be the only column"
            )
    return tuple(wanted)


def default_y(file: Header) -> tuple[str, ...]:
    """Return the default column for y; raise a UserError if there is none."""
    for name in USUAL_Y:
        if name in file.columns:
            return checked_names("y", name, file)
    raise UserError(
        f"y must name a column of {file.path}, which has no {' or '.join(map(repr, USUAL_Y))}: it "
        f"has {shown(list(file.columns))}"
    )


def default_x(file: Header, y: tuple[str, ...]) -> tuple[str, ...]:
    """Return the default columns for x, without index columns; raise a UserError if none."""
    if "x" in file.columns and "x" not in y:
        return checked_names("x", "x", file)
    rest = [name for name in file.columns if name not in y and name not in file.indexes]
    if not rest:
        raise UserError(f"x must name columns of {file.path}: it has none except y={list(y)}")
    return checked_names("x", rest, file)
