"""A server's part of a worker's vectors: cut out, encoded, and written back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..communication.cuda.staging import pinned
from ..communication.endpoint import as_bytes
from ..compression import Allowance, AllowanceOf, Codec, EntropyCoded, VariableMessage
from ..kernels import Blocks, array_module, empty_like
from ..parameters import Parameters

Array = Any  #: a NumPy or CuPy array
HostArray = npt.NDArray[Any]


class Part:
    """The slices of the model on a given server, as a worker pushes and pulls them.

    Args:
        runs: (start, stop) of the part's values in the flat vector, in order.
        shapes: of the part's slices.
        parameters: the model.
        codec: given the bits, returns the codec of a push. None: lossless.
        staged: True delays changes of a pulled vector until `put_received`. Needed if a server may
            fail after its peers have answered.

    If the part is a single run of a NumPy vector and not staged, nothing is copied. Local.
    """

    def __init__(
        self,
        runs: Sequence[tuple[int, int]],
        shapes: Mapping[str, tuple[int, ...]],
        parameters: Parameters,
        codec: Callable[[float], Codec] | None,
        *,
        staged: bool = False,
    ) -> None:
        flat = parameters.flat
        self._runs, self._codec = tuple(runs), codec
        self._layout = layout(shapes, parameters.dtype)
        self._coded: dict[float, tuple[Codec, Blocks, VariableMessage | None]] = {}  # keyed by bits
        self._on_host = array_module(flat) is np
        ends = list(accumulate(stop - start for start, stop in runs))
        self._ends = ends
        self.values = values = ends[-1] if ends else 0  #: number of values in the part
        self.bytes = values * parameters.dtype.itemsize  #: of the part in full precision
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
        """Encode the part of a vector [n] for sending.

        Args:
            vector: not changed.
            residual: float32 [n], updated. None with lossless codecs.
            bits: per value.
            allowance_of: for codecs with a quantization step shared by all parts of the vector: see
                `pairs`. By default the part has steps of its own.
        Returns:
            uint8 in host memory, valid until the next call.
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
        if self._cut_residual is not None:
            self.put(lost, residual)
        return self._to_host(payload)

    def pairs(
        self, codec: EntropyCoded, vector: Array, residual: Array, bits: float
    ) -> list[tuple[Array, Array]]:
        """Return this part's slices of both vectors [n] under `codec`, for `Allowance`."""
        if self._codec is None:
            return []
        _, _, variable = self._coding(bits)
        pairs = []
        for own, values in variable.entropy_coded() if variable is not None else ():
            for (start, stop), end in zip(self._runs, self._ends, strict=True):
                before = start - (end - (stop - start))  # offset from the part to the vector
                begin, last = max(values.start + before, start), min(values.stop + before, stop)
                if own == codec and begin < last:
                    pairs.append((vector[begin:last], residual[begin:last]))
        return pairs

    def _coding(self, bits: float) -> tuple[Codec, Blocks, VariableMessage | None]:
        """Return codec and blocks for `bits`, and a `VariableMessage` if messages vary in size."""
        if bits not in self._coded:
            assert self._codec is not None
            codec = self._codec(bits)
            blocks = codec.blocks(self._layout)
            variable = None if codec.has_fixed_length else VariableMessage(codec, blocks)
            self._coded[bits] = codec, blocks, variable
        return self._coded[bits]

    def into(self, out: Array) -> HostArray:
        """Return the memory to receive a pulled part: uint8. Call `put_received` afterwards."""
        if self._pulled is None:
            ((start, stop),) = self._runs
            return as_bytes(out[start:stop])
        return self._pulled

    def put_received(self, out: Array) -> None:
        """Copy the received part to its place in `out` [n]."""
        if self._pulled is not None:
            self.put(self._pulled.view(out.dtype), out)

    def cut(self, vector: HostArray) -> HostArray:
        """Return a copy of this part of a vector [n] in host memory."""
        pieces = [vector[start:stop] for start, stop in self._runs]
        return np.concatenate(pieces) if pieces else vector[:0].copy()

    def all_of(self, marked: npt.NDArray[np.bool_]) -> bool:
        """Return True if the whole part is marked, bool [n]. For an empty part: if all of it is."""
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
        """Copy a part, from host or device memory, to its place in `out` [n]."""
        if isinstance(values, np.ndarray) and not self._on_host:
            values = array_module(out).asarray(values)
        for (start, stop), end in zip(self._runs, self._ends, strict=True):
            out[start:stop] = values[end - (stop - start) : end]

    def _to_host(self, array: Array) -> HostArray:
        if self._pushed is None:
            return array  # type: ignore[no-any-return]
        if len(self._pushed) < array.size:  # a few encoded values may exceed full precision
            self._pushed = pinned(array, array.size, np.uint8)
        pushed = self._pushed[: array.size]
        array.get(out=pushed)
        return pushed


def layout(shapes: Mapping[str, tuple[int, ...]], dtype: npt.DTypeLike) -> Parameters:
    """Return zeros in a part's layout. An empty part has a single empty array."""
    return Parameters({name: np.zeros(s, dtype) for name, s in (shapes or {"none": (0,)}).items()})
