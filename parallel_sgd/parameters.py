"""Parameters: a flat vector with named views, for every algorithm and exchange."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from .errors import UserError
from .kernels import array_module, blocks, empty_like
from .validation import kind_of, shown

Array = Any  #: a NumPy or CuPy array


class Parameters(Mapping[str, Array]):
    """A model's parameters (or their gradient) as named views into one contiguous vector.

    Args:
        arrays: the initial values by name, all of the same dtype, all NumPy or all CuPy. The values
            are copied in the given order, without gaps; the originals are not kept.
    Raises:
        UserError: no mapping of names to arrays, no arrays, several dtypes, or a dtype besides
            float32 and float64.

    ``p.flat`` is the vector, ``p["W1"]`` a view into the vector with the original shape. Local.

    >>> p = Parameters({"W": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)})
    >>> p["b"] += 2
    >>> p.flat.tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        _require_arrays(arrays)
        dtypes = {str(a.dtype) for a in arrays.values()}
        if dtypes not in ({"float32"}, {"float64"}):
            raise UserError(
                "parameters must be arrays of one dtype, float32 or float64; "
                f"got {', '.join(sorted(dtypes)) or 'none at all'}"
            )
        self._shapes = {name: tuple(a.shape) for name, a in arrays.items()}
        first = next(iter(arrays.values()))
        self._set_flat(empty_like(first, sum(a.size for a in arrays.values())))
        for name, a in arrays.items():
            self[name] = a

    def _set_flat(self, flat: Array) -> None:
        self._flat = flat
        self._views, self._begins = {}, [0]
        for name, shape in self._shapes.items():
            begin = self._begins[-1]
            self._begins.append(begin + math.prod(shape))
            self._views[name] = flat[begin : self._begins[-1]].reshape(shape)

    @property
    def flat(self) -> Array:
        """The vector [n] shared by all views."""
        return self._flat

    @flat.setter
    def flat(self, values: Array) -> None:
        if values is not self._flat:  # the same object after `p.flat += g`
            self._flat[...] = values  # a new array would not share memory with the views

    def rebind(self, flat: Array) -> None:
        """Rebind all views to another vector [n] of this dtype, with its values.

        Nothing is copied. The old vector stays unchanged for readers that still use it.
        """
        assert flat.shape == self._flat.shape and flat.dtype == self._flat.dtype
        self._set_flat(flat)

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self._views[name][...] = value  # `p["W"] += g` writes through the view

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.flat.dtype)
        return dtype

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The layout: shapes by name, in the order of the vector."""
        return dict(self._shapes)

    def like(self) -> Parameters:
        """Return zeros of the same layout, for a gradient or an optimizer's state."""
        zeros = object.__new__(type(self))
        zeros._shapes = self._shapes
        zeros._set_flat(empty_like(self.flat, self.flat.size))
        zeros.flat.fill(0)
        return zeros

    def part(self, first: int, last: int) -> Parameters:
        """Return parameters ``first`` to ``last - 1`` alone, in the same vector, without a copy."""
        part = object.__new__(type(self))
        part._shapes = dict(islice(self._shapes.items(), first, last))
        part._set_flat(self._flat[self._begins[first] : self._begins[last]])
        return part

    def block_starts(self, block_size: int) -> blocks.IndexArray:
        """Return the starts of the quantization blocks: see `parallel_sgd.kernels.blocks.cut`."""
        return blocks.cut([view.size for view in self._views.values()], block_size)

    def __getstate__(self) -> dict[str, Any]:
        return {"shapes": self._shapes, "flat": self.flat}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shapes = state["shapes"]
        self._set_flat(state["flat"])  # new views: copies would not share memory with `flat`

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{list(shape)}" for name, shape in self._shapes.items())
        return f"Parameters({shapes}; {self.flat.size} {self.dtype} values)"


def _require_arrays(arrays: Any) -> None:
    """Refuse anything but a mapping from names to arrays of a single library.

    Raises:
        UserError: names the invalid entry, and its type.
    """
    if not isinstance(arrays, Mapping):
        raise UserError(
            f"parameters={shown(arrays)} must be a mapping from names to arrays: it is "
            f"{kind_of(arrays)}"
        )
    libraries = set()
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise UserError(f"parameters: name {shown(name)} must be a text: it is {kind_of(name)}")
        if isinstance(array, type) or not hasattr(array, "dtype") or not hasattr(array, "shape"):
            like = ", as from np.zeros(shape, np.float32)" if _is_shape(array) else ""
            raise UserError(
                f"parameters[{name!r}]={shown(array)} must be an array with its initial values"
                f"{like}: it is {kind_of(array)}"
            )
        libraries.add(array_module(array).__name__)
    if len(libraries) > 1:
        raise UserError("parameters must be all of NumPy, or all of CuPy: got both")


def _is_shape(value: Any) -> bool:
    lengths = value if isinstance(value, tuple | list) else [value]
    return bool(lengths) and all(isinstance(n, int) for n in lengths)
