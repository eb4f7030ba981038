"""The part of a worker's vectors that one server keeps: cut out, encoded, and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..communication.endpoint import as_bytes
from ..communication.mpi.staging import pinned
from ..compression import Allowance, AllowanceOf, Codec, EntropyCoded, VariableMessage
from ..kernels import Blocks, array_module, empty_like
from ..parameters import Parameters

Array = Any  #: a NumPy or CuPy array
HostArray = npt.NDArray[Any]


class Part:
    """The slices of the model that one server holds, as a worker pushes and pulls them.

    Args:
        runs: (start, stop) of the part's values in the flat vector, in their order.
        shapes: of the part's slices.
        parameters: the model.
        codec: of what is pushed with so many bits; None where nothing is ever lost.
        error_feedback: False forgets what codecs lose.
        staged: whether what is pulled changes a vector in `put_received` only: where servers may
            die, and others have answered.

    Where the part is one run of a NumPy vector, and not staged, nothing is copied. Local.
    """

    def __init__(
        self,
        runs: Sequence[tuple[int, int]],
        shapes: Mapping[str, tuple[int, ...]],
        parameters: Parameters,
        codec: Callable[[float], Codec] | None,
        *,
        error_feedback: bool = True,
        staged: bool = False,
    ) -> None:
        flat = parameters.flat
        self._runs, self._codec, self._error_feedback = tuple(runs), codec, error_feedback
        self._layout = layout(shapes, parameters.dtype)
        self._coded: dict[float, tuple[Codec, Blocks, VariableMessage | None]] = {}  # by bits
        self._on_host = array_module(flat) is np
        ends = list(accumulate(stop - start for start, stop in runs))
        self._ends = ends
        self.values = values = ends[-1] if ends else 0  #: how many there are
        self.bytes = values * parameters.dtype.itemsize  #: of the part, in full precision
        whole = len(self._runs) == 1
        self._cut = None if whole else empty_like(flat, values)
        self._cut_residual = empty_like(flat, values) if codec and not whole else None
        self._payload = empty_like(flat, 0, np.uint8) if codec else None
        self._pushed = self._pulled = None
        if not self._on_host:
            self._pushed = pinned(flat, self.bytes, np.uint8)
            self._pulled = pinned(flat, self.bytes, np.uint8)
        elif staged or not whole:
            self._pulled = np.empty(self.bytes, np.uint8)

    def encoded(
        self,
        vector: Array,
        residual: Array | None,
        bits: float = 32,
        allowance_of: AllowanceOf | None = None,
    ) -> HostArray:
        """The part of a vector [n] as it is sent: uint8, in host memory, valid until the next call.

        Args:
            vector: not changed.
            residual: float32 [n], updated; None where nothing is ever lost.
            bits: a value.
            allowance_of: for codecs with steps, which all parts of the vector share: see `pairs`.
                The part has steps of its own, if not given.
        """
        values = self._of(vector, self._cut)
        if self._codec is None or self._payload is None:
            return self._to_host(values.view(np.uint8))
        assert residual is not None
        codec, blocks, variable = self._coding(bits)
        needed = int(blocks.offsets[-1])
        if self._payload.size < needed:
            self._payload = empty_like(vector, needed, np.uint8)
        payload = self._payload[:needed]
        lost = self._of(residual, self._cut_residual)
        if variable is not None:
            if allowance_of is None:
                allowance_of = cache(
                    lambda codec: Allowance(codec, self.pairs(codec, vector, residual, bits))
                )
            payload = variable.encode(values, lost, payload, allowance_of)
        else:
            codec.encode(blocks, values, lost, payload)
        if not self._error_feedback:
            lost.fill(0)
        if self._cut_residual is not None:
            self.put(lost, residual)
        return self._to_host(payload)

    def pairs(
        self, codec: EntropyCoded, vector: Array, residual: Array, bits: float
    ) -> list[tuple[Array, Array]]:
        """What this part has of the values of a codec: parts of both vectors [n], as
        `compression.Allowance` takes them."""
        if self._codec is None:
            return []
        _, _, variable = self._coding(bits)
        pairs = []
        for own, values in variable.entropy_coded() if variable is not None else ():
            for (start, stop), end in zip(self._runs, self._ends, strict=True):
                before = start - (end - (stop - start))  # of a place in the vector, and in the part
                begin, last = max(values.start + before, start), min(values.stop + before, stop)
                if own == codec and begin < last:
                    pairs.append((vector[begin:last], residual[begin:last]))
        return pairs

    def _coding(self, bits: float) -> tuple[Codec, Blocks, VariableMessage | None]:
        """With so many bits; the last one where the length of messages is not fixed."""
        if bits not in self._coded:
            assert self._codec is not None
            codec = self._codec(bits)
            blocks = codec.blocks(self._layout)
            variable = None if codec.has_fixed_length else VariableMessage(codec, blocks)
            self._coded[bits] = codec, blocks, variable
        return self._coded[bits]

    def into(self, out: Array) -> HostArray:
        """Where a pulled part is to be received: uint8; `put_received` then puts it into `out`."""
        if self._pulled is None:
            ((start, stop),) = self._runs
            return as_bytes(out[start:stop])
        return self._pulled

    def put_received(self, out: Array) -> None:
        """Put what `into` has received where it belongs in `out` [n]."""
        if self._pulled is not None:
            self.put(self._pulled.view(out.dtype), out)

    def cut(self, vector: HostArray) -> HostArray:
        """A copy of the part of a vector [n] in host memory."""
        pieces = [vector[start:stop] for start, stop in self._runs]
        return np.concatenate(pieces) if pieces else vector[:0].copy()

    def all_of(self, marked: npt.NDArray[np.bool_]) -> bool:
        """Whether all of the part is marked, in bool [n]; an empty one is where all of the model
        is."""
        if not self._runs:
            return bool(marked.all())
        return all(bool(marked[start:stop].all()) for start, stop in self._runs)

    def _of(self, vector: Array, cut: Array | None) -> Array:
        if cut is None:
            ((start, stop),) = self._runs
            return vector[start:stop]
        for (start, stop), end in zip(self._runs, self._ends, strict=True):
            cut[end - (stop - start) : end] = vector[start:stop]
        return cut

    def put(self, values: Array, out: Array) -> None:
        """Put a part, which may be in host memory, where it belongs in `out` [n]."""
        if isinstance(values, np.ndarray) and not self._on_host:
            values = array_module(out).asarray(values)
        for (start, stop), end in zip(self._runs, self._ends, strict=True):
            out[start:stop] = values[end - (stop - start) : end]

    def _to_host(self, array: Array) -> HostArray:
        if self._pushed is None:
            return array  # type: ignore[no-any-return]
        if len(self._pushed) < array.size:  # few values with levels may be more than whole ones
            self._pushed = pinned(array, array.size, np.uint8)
        pushed = self._pushed[: array.size]
        array.get(out=pushed)
        return pushed


def layout(shapes: Mapping[str, tuple[int, ...]], dtype: npt.DTypeLike) -> Parameters:
    """Zeros of a part's layout; of an empty one, where a server has nothing to keep."""
    return Parameters({name: np.zeros(s, dtype) for name, s in (shapes or {"none": (0,)}).items()})
