"""Arrays of a GPU on their way to MPI and back, beside whatever else the GPU does.

A GPU works off what it is told later, in streams, and MPI knows nothing of streams. So a message
may be sent when an event says that the GPU has come so far; events are asked, never waited for.
What arrives is in its array for whatever the current stream does from then on.

Tested with a stand-in for CuPy, and with two ranks that share a GPU; `Direct` with the stand-in
only.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels import array_module, on_device

Array = Any  #: a CuPy array, contiguous and one-dimensional
Event = Any  #: of CuPy
HostArray = npt.NDArray[Any]

_NOT_READY = 600  # cudaErrorNotReady, which CuPy has no name for


def is_done(xp: Any, event: Event) -> bool:
    """Whether the GPU has come to an event. Local; never waits.

    Args:
        xp: CuPy.
    Raises:
        CUDARuntimeError: the GPU has failed. `Event.done` would then be False for ever.
    """
    status = xp.cuda.runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise xp.cuda.runtime.CUDARuntimeError(status)
    return bool(status == 0)


def recorded(xp: Any, stream: Any) -> Event:
    """An event that is done when a stream has done what it has been told so far. Local."""
    return stream.record(xp.cuda.Event(disable_timing=True))


def pinned(like: Array, values: int, dtype: npt.DTypeLike) -> HostArray:
    """Uninitialised pinned memory for so many values, given back when nobody has it.

    Args:
        like: an array on the GPU that copies it.

    It comes from CuPy's own pool, which keeps what is given back by its size. The messages of one
    layout have the same sizes in every exchange, so after the first one nothing is allocated (which
    would wait for the GPU), and the pool holds no more than was ever under way at once. Local.
    """
    nbytes = values * np.dtype(dtype).itemsize
    return np.frombuffer(array_module(like).cuda.alloc_pinned_memory(max(nbytes, 1)), dtype, values)


def pinned_like(array: Array) -> HostArray:
    """`pinned` for the values of an array. Local."""
    return pinned(array, array.size, array.dtype)


class Staging(ABC):
    """What MPI is given in place of the arrays of one GPU.

    Args:
        like: an array on the GPU.
    """

    def __init__(self, like: Array) -> None:
        self._xp = array_module(like)

    def _now(self) -> Event:
        return recorded(self._xp, self._xp.cuda.get_current_stream())

    @abstractmethod
    def leave(self, array: Array) -> tuple[Array, Event]:
        """What MPI may send when the event is done; it stays as it is until as many `left`."""

    @abstractmethod
    def left(self, array: Array) -> None:
        """It has been sent."""

    @abstractmethod
    def expect(self, array: Array) -> tuple[Array, Event | None, Callable[[], object]]:
        """What MPI may receive into when the event is done (at once, if None), and what to call
        when it has: after that the current stream finds it in the array."""


class Direct(Staging):
    """The arrays themselves, for an MPI that takes them: when the GPU is done with them."""

    def leave(self, array: Array) -> tuple[Array, Event]:
        return array, self._now()

    def left(self, array: Array) -> None:
        pass

    def expect(self, array: Array) -> tuple[Array, Event | None, Callable[[], object]]:
        return array, self._now(), lambda: None


class Staged(Staging):
    """Through pinned host memory, by a stream for each way that nothing else waits for.

    An array that goes to several ranks is copied once. Memory: pinned, of the size (to the next
    power of two) of the messages under way.
    """

    def __init__(self, like: Array) -> None:
        super().__init__(like)
        with on_device(like):
            self._out = self._xp.cuda.Stream(non_blocking=True)
            self._in = self._xp.cuda.Stream(non_blocking=True)
        self._leaving: dict[tuple[int, int, Any], _Copy] = {}
        self._landing: deque[tuple[Event, HostArray]] = deque()  # read by copies under way
        # A copy may still read its pinned memory when the last exchange is long over for the host.
        weakref.finalize(self, _wait_for, self._landing).atexit = False

    def leave(self, array: Array) -> tuple[Array, Event]:
        copy = self._leaving.get(_place(array))
        if copy is None:
            copy = self._leaving[_place(array)] = self._copy_out(array)
        copy.uses += 1
        return copy.host, copy.event

    def left(self, array: Array) -> None:
        copy = self._leaving[_place(array)]
        copy.uses -= 1
        if copy.uses == 0:
            del self._leaving[_place(array)]

    def expect(self, array: Array) -> tuple[Array, Event | None, Callable[[], object]]:
        self._release()
        host, before = pinned_like(array), self._now()
        return host, None, partial(self._land, array, host, before)

    def _copy_out(self, array: Array) -> _Copy:
        self._release()
        host = pinned_like(array)
        self._out.wait_event(self._now())
        array.data.copy_to_host_async(host.ctypes.data, array.nbytes, self._out)
        return _Copy(array, host, recorded(self._xp, self._out))

    def _land(self, array: Array, host: HostArray, before: Event) -> None:
        """Copy what has come, once the GPU has done what it was told `before` it was expected."""
        self._in.wait_event(before)
        array.data.copy_from_host_async(host.ctypes.data, array.nbytes, self._in)
        landed = recorded(self._xp, self._in)
        self._xp.cuda.get_current_stream().wait_event(landed)
        self._landing.append((landed, host))

    def _release(self) -> None:
        """Let go of pinned memory that no copy reads any more."""
        while self._landing and is_done(self._xp, self._landing[0][0]):
            self._landing.popleft()


@dataclass(slots=True)
class _Copy:
    """Of an array (kept alive) in the host's memory, there when the event is done."""

    array: Array
    host: HostArray
    event: Event
    uses: int = 0


def _place(array: Array) -> tuple[int, int, Any]:
    return array.data.ptr, array.size, array.dtype


def _wait_for(landing: deque[tuple[Event, HostArray]]) -> None:
    for event, _ in landing:
        event.synchronize()
