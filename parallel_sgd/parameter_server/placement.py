"""Placement of the model on servers: parameters are cut into slices, and slices are assigned.

Every process computes the placement from the shapes alone, with the same result.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import UserError
from ..options import Choice, Options, Whole, option, options
from ..parameters import Parameters
from ..validation import choice, integer, shown

__all__ = ["DISPATCH", "Dispatch", "Placement", "PlacementOptions", "Slice", "place"]

#: Chooses a slice's server: (slice's label, number among all slices, number of servers) -> server.
Dispatch = Callable[[str, int, int], int]


def _round_robin(name: str, number: int, servers: int) -> int:
    """Return the servers in turn. The turn continues across parameters."""
    return number % servers


def _by_hash(name: str, number: int, servers: int) -> int:
    """Return a server by the hash of the slice's name. A new layer moves no existing slice."""
    return zlib.crc32(name.encode()) % servers  # Python's own hash differs in every process


#: The named rules.
DISPATCH: Mapping[str, Dispatch] = {"round-robin": _round_robin, "hash": _by_hash}


@dataclass(frozen=True)
class Slice:
    """Consecutive values of a parameter, held by the same server.

    Args:
        name: of the parameter.
        start, stop: range of the values in the flat vector of all parameters.
        shape: of the slice. Parameters with two or more dimensions are cut into whole rows.
        label: the slice's unique name: "W1[0:334]", counted in rows (in values for a parameter with
            a single dimension), or the parameter's name if uncut.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    label: str

    @property
    def values(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Placement:
    """The slices of every server.

    Args:
        servers: the slices of each server, in the order of the flat vector. Empty for a server if
            there are fewer slices than servers, or by chance.

    Local.
    """

    servers: tuple[tuple[Slice, ...], ...]

    def values(self, server: int) -> int:
        """Return the number of values on a server."""
        return sum(slice_.values for slice_ in self.servers[server])

    def runs(self, server: int) -> list[tuple[int, int]]:
        """Return a server's ranges of the flat vector as (start, stop): as few as possible.

        Concatenated, the ranges are the flat vector of a `Parameters` with the shapes of
        `shapes(server)`.
        """
        runs: list[tuple[int, int]] = []
        for slice_ in self.servers[server]:
            if runs and runs[-1][1] == slice_.start:
                runs[-1] = (runs[-1][0], slice_.stop)
            elif slice_.values:
                runs.append((slice_.start, slice_.stop))
        return runs

    def shapes(self, server: int) -> dict[str, tuple[int, ...]]:
        """Return the layout of a server's part: the shape of each slice by label, in order."""
        return {slice_.label: slice_.shape for slice_ in self.servers[server]}

    @property
    def largest(self) -> int:
        """Number of values on the fullest server, the slowest of a round."""
        return max(map(self.values, range(len(self.servers))))

    @property
    def smallest(self) -> int:
        """Number of values on the emptiest server."""
        return min(map(self.values, range(len(self.servers))))


def place(
    shapes: Mapping[str, tuple[int, ...]],
    servers: int,
    *,
    dispatch: str | Dispatch = "round-robin",
    slice_parameters: bool = True,
    min_block: int = 8192,
) -> Placement:
    """Assign a model to servers.

    A parameter of n values is cut into k slices of b values; with two or more dimensions b is
    rounded up to whole rows. So the last slice may be shorter, and there may be fewer than k
    slices.

        k = min(servers, max(1, ⌊n / min_block⌋))       b = ⌈n / k⌉

    Args:
        shapes: of every parameter by name, in the order of the flat vector: `Parameters.shapes`.
        servers: number of servers, at least 1.
        dispatch: "round-robin" (each slice to the next server), "hash" (CRC-32 of the label), or a
            function (label, number of the slice among all slices, `servers`) -> server, with the
            same result in every process.
        slice_parameters: False keeps every parameter whole.
        min_block: a parameter of n values is cut into at most n / min_block slices.

    Returns:
        The placement. A parameter without values is a single slice, so that every name has a
        server.

    Raises:
        UserError: an argument is invalid, `dispatch` returns no valid server, or a parameter has
            the same label as another parameter's slice.

    Local; the same in every process.

    Source: PaddlePaddle Fluid, `slice_variable` and `ps_dispatcher`. There "hash" is Python's,
    which differs between processes.

    >>> placement = place({"W": (1000, 784), "b": (1000,)}, 3)
    >>> placement.shapes(0)
    {'W[0:334]': (334, 784), 'b': (1000,)}
    >>> placement.shapes(2)
    {'W[668:1000]': (332, 784)}
    """
    count = integer("servers", servers, 1)
    most = count if choice("slice_parameters", slice_parameters, (True, False)) else 1
    least = integer("min_block", min_block, 1)
    choose = _rule(dispatch)
    held: list[list[Slice]] = [[] for _ in range(count)]
    labels: dict[str, str] = {}
    for number, slice_ in enumerate(_slices(shapes, most, least)):
        if slice_.label in labels:
            raise UserError(
                f"parameters must differ in name from each other's slices: {slice_.label!r} is "
                f"both of {labels[slice_.label]!r} and of {slice_.name!r}"
            )
        labels[slice_.label] = slice_.name
        chosen = choose(slice_.label, number, count)
        held[integer(f"placement of {slice_.label!r}: server", chosen, 0, count - 1)].append(slice_)
    return Placement(tuple(map(tuple, held)))


def _rule(dispatch: str | Dispatch) -> Dispatch:
    if callable(dispatch):
        return dispatch
    if not isinstance(dispatch, str) or dispatch not in DISPATCH:
        names = ", ".join(map(repr, DISPATCH))
        raise UserError(
            f"placement={shown(dispatch)} must be one of {names} (in Python also a function)"
        )
    return DISPATCH[dispatch]


def _slices(shapes: Mapping[str, tuple[int, ...]], most: int, least: int) -> Iterator[Slice]:
    """Yield all slices in the order of the flat vector.

    Args:
        most: slices per parameter.
        least: values per slice.
    """
    begin = 0
    for name, dimensions in shapes.items():
        shape = tuple(integer(f"shape of {name!r}: dimension", n, 0) for n in dimensions)
        values = math.prod(shape)
        row = math.prod(shape[1:])  # 1 without rows
        k = min(most, max(1, values // least))
        block = -(-values // k)
        block += -block % max(1, row)
        edges = [*range(0, values, max(1, block)), values] if values else [0, 0]
        for start, stop in pairwise(edges):
            whole = stop - start == values
            first, last = start // max(1, row), stop // max(1, row)
            yield Slice(
                name,
                begin + start,
                begin + stop,
                shape if whole else (last - first, *shape[1:]),
                name if whole else f"{name}[{first}:{last}]",
            )
        begin += values


@dataclass(frozen=True, repr=False)
class PlacementFunction:
    """A user's dispatch function.

    Its repr is the function's name, equal on all ranks. The resulting placements are compared too.
    """

    function: Dispatch

    def __call__(self, label: str, number: int, servers: int) -> int:
        return self.function(label, number, servers)

    def __repr__(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))


class NameOrFunction(Choice):
    """An option's check: the name of a rule, or in Python a function."""

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, PlacementFunction):
            return value
        return PlacementFunction(value) if callable(value) else super().__call__(name, value)


@options
class PlacementOptions(Options):
    """Options of the placement."""

    placement: str | Dispatch = option(
        "round-robin",
        NameOrFunction(*DISPATCH),
        "the rule that gives each slice of the model to a server: by turns or by a hash of the "
        "slice's name; in Python also a function of its name, its number, and the number of "
        "servers",
    )
    slice_parameters: bool = option(
        True, Choice(True, False), "cut parameters into slices, instead of keeping each whole"
    )
    min_block: int = option(
        8192, Whole(1), "a parameter is cut into at most one slice for each this many values"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_use("min_block", self.slice_parameters, "slice_parameters=True")

    def place(self, parameters: Parameters, servers: int) -> Placement:
        """Return the placement of a model on servers. Local."""
        return place(
            parameters.shapes,
            servers,
            dispatch=self.placement,
            slice_parameters=self.slice_parameters,
            min_block=self.min_block,
        )
