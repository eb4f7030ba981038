"""Which server holds which part of the model: parameters are cut into slices, and slices dealt.

Every process works it out for itself, from the shapes alone, and all come to the same.
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

#: Says which server gets a slice: from the slice's name, its number among all, and the servers.
Dispatch = Callable[[str, int, int], int]


def _round_robin(name: str, number: int, servers: int) -> int:
    """A cursor that is carried over from parameter to parameter, not set back for each."""
    return number % servers


def _by_hash(name: str, number: int, servers: int) -> int:
    """By the slice's name: a layer added to the model moves no other's slices."""
    return zlib.crc32(name.encode()) % servers  # Python's own hash differs in every process


#: The rules that have a name.
DISPATCH: Mapping[str, Dispatch] = {"round-robin": _round_robin, "hash": _by_hash}


@dataclass(frozen=True)
class Slice:
    """Consecutive values of one parameter, which one server holds.

    Args:
        name: of the parameter.
        start, stop: where the values lie in the flat vector of all parameters.
        shape: of the slice; where the parameter has two or more dimensions, of whole rows.
        label: the slice's own name, which no other has: "W1[0:334]", counted in rows (in values
            where there is one dimension), or the parameter's where it is not cut.
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
    """All slices of a model, each at one server.

    Args:
        servers: for every server its slices, in the order of the flat vector; none where there are
            fewer slices than servers, or chance has it so.

    Local.
    """

    servers: tuple[tuple[Slice, ...], ...]

    def values(self, server: int) -> int:
        """How many values a server holds."""
        return sum(slice_.values for slice_ in self.servers[server])

    def runs(self, server: int) -> list[tuple[int, int]]:
        """Where a server's values lie in the flat vector: as few ranges (start, stop) as possible.

        Laid one behind the other they are the flat vector of `Parameters` made of `shapes(server)`.
        """
        runs: list[tuple[int, int]] = []
        for slice_ in self.servers[server]:
            if runs and runs[-1][1] == slice_.start:
                runs[-1] = (runs[-1][0], slice_.stop)
            elif slice_.values:
                runs.append((slice_.start, slice_.stop))
        return runs

    def shapes(self, server: int) -> dict[str, tuple[int, ...]]:
        """The layout of a server's part: the label of each slice with its shape, in order."""
        return {slice_.label: slice_.shape for slice_ in self.servers[server]}

    @property
    def largest(self) -> int:
        """How many values the server that holds most holds: a round is as slow as that one."""
        return max(map(self.values, range(len(self.servers))))

    @property
    def smallest(self) -> int:
        """How many values the server that holds least holds."""
        return min(map(self.values, range(len(self.servers))))


def place(
    shapes: Mapping[str, tuple[int, ...]],
    servers: int,
    *,
    dispatch: str | Dispatch = "round-robin",
    slice_parameters: bool = True,
    min_block: int = 8192,
) -> Placement:
    """Share a model among servers.

    A parameter of n values is cut into k = min(servers, max(1, ⌊n / min_block⌋)) slices of
    b = ⌈n / k⌉ values, b rounded up to whole rows where it has two or more dimensions. So the last
    slice may be shorter, and there may be fewer than k.

    Args:
        shapes: of every parameter by name, in the order of the flat vector: `Parameters.shapes`.
        servers: how many there are, at least 1.
        dispatch: "round-robin" (the next slice to the next server), "hash" (the CRC-32 of its
            label), or a function of a slice's label, its number counted over all parameters, and
            `servers` that returns a server, and the same in every process.
        slice_parameters: False keeps every parameter whole.
        min_block: a parameter is cut into no more slices than it has so many values.

    Returns:
        The placement. A parameter without values is one slice, so that every name is somewhere.

    Raises:
        UserError: an argument is not as required, `dispatch` returns no server, or a parameter
            bears the label of another's slice.

    Local; the same in every process.

    Source: PaddlePaddle Fluid, `slice_variable` and `ps_dispatcher`. There "hash" is Python's,
    which differs from process to process.

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
    """All slices in the order of the flat vector: of each parameter `most`, of `least` values."""
    begin = 0
    for name, dimensions in shapes.items():
        shape = tuple(integer(f"shape of {name!r}: dimension", n, 0) for n in dimensions)
        values = math.prod(shape)
        row = math.prod(shape[1:])  # one value where there are no rows
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
    """A user's function, named alike on all ranks; what it says must agree too."""

    function: Dispatch

    def __call__(self, label: str, number: int, servers: int) -> int:
        return self.function(label, number, servers)

    def __repr__(self) -> str:
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))


class NameOrFunction(Choice):
    """The name of a rule, or in Python a user's function."""

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, PlacementFunction):
            return value
        return PlacementFunction(value) if callable(value) else super().__call__(name, value)


@options
class PlacementOptions(Options):
    """Which server holds what."""

    placement: str | Dispatch = option(
        "round-robin",
        NameOrFunction(*DISPATCH),
        "which server gets a slice of the model, by turns or by a hash of its name; in Python also "
        "a function of its name, its number, and the number of servers",
    )
    slice_parameters: bool = option(
        True, Choice(True, False), "whether parameters are cut into slices, and not kept whole"
    )
    min_block: int = option(
        8192, Whole(1), "a parameter is cut into no more slices than it has so many values"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_use("min_block", self.slice_parameters, "slice_parameters=True")

    def place(self, parameters: Parameters, servers: int) -> Placement:
        """Which server holds which part of a model. Local."""
        return place(
            parameters.shapes,
            servers,
            dispatch=self.placement,
            slice_parameters=self.slice_parameters,
            min_block=self.min_block,
        )
