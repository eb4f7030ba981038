"""Stage GPU arrays for MPI messages, concurrently with other GPU work.

A GPU executes work later, in streams, and MPI knows nothing of streams. So a message is sent only
after a GPU event is done; events are polled, never waited for. A received message is ready in its
array for later work on the current stream.

Tested with a stand-in for CuPy, and with two ranks sharing a GPU; `Direct` only with the stand-in.
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
Event = Any  #: a CuPy event
HostArray = npt.NDArray[Any]

_NOT_READY = 600  # cudaErrorNotReady, without a name in CuPy


def is_done(xp: Any, event: Event) -> bool:
    """Return True if the GPU has reached an event. Local; never waits.

    Args:
        xp: CuPy.
        event: a CuPy event.
    Raises:
        CUDARuntimeError: the GPU has failed. `Event.done` would then be False for ever.
    """
    status = xp.cuda.runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise xp.cuda.runtime.CUDARuntimeError(status)
    return bool(status == 0)


def recorded(xp: Any, stream: Any) -> Event:
    """Record an event at the present end of a stream. Local."""
    return stream.record(xp.cuda.Event(disable_timing=True))


def pinned(like: Array, values: int, dtype: npt.DTypeLike) -> HostArray:
    """Allocate uninitialised pinned memory, freed with its last reference.

    Args:
        like: an array on the GPU used for copies.
        values: number of values.
        dtype: type of the values.

    The memory comes from CuPy's pool, which keeps freed blocks by size. The messages of one layout
    have the same sizes in every exchange. So after the first exchange nothing is allocated (which
    would wait for the GPU), and the pool holds at most the largest number of bytes ever pending at
    once. Local.
    """
    nbytes = values * np.dtype(dtype).itemsize
    return np.frombuffer(array_module(like).cuda.alloc_pinned_memory(max(nbytes, 1)), dtype, values)


def pinned_like(array: Array) -> HostArray:
    """Allocate pinned memory with the size and type of an array. Local."""
    return pinned(array, array.size, array.dtype)


def to_host(array: Array) -> HostArray:
    """Return a copy of a GPU's array in pinned memory, after earlier work on the current stream.

    Local.
    """
    host, stream = pinned_like(array), array_module(array).cuda.get_current_stream()
    array.get(stream=stream, out=host)
    # bounded: this rank's GPU: waiting ranks end the job
    stream.synchronize()
    return host


def to_device(host: HostArray, array: Array) -> None:
    """Copy an array in pinned memory to a GPU's array of its size. Local."""
    array.set(host)
    # bounded: this rank's GPU: waiting ranks end the job
    array_module(array).cuda.get_current_stream().synchronize()


class Staging(ABC):
    """Replaces the arrays of one GPU by arrays for MPI.

    Args:
        like: an array on the GPU.
    """

    def __init__(self, like: Array) -> None:
        self._xp = array_module(like)

    def _now(self) -> Event:
        return recorded(self._xp, self._xp.cuda.get_current_stream())

    @abstractmethod
    def begin_send(self, array: Array) -> tuple[Array, Event]:
        """Return an array for MPI to send once the event is done. Unchanged until `end_send`.

        An array sent several times needs as many calls of `end_send`.
        """

    @abstractmethod
    def end_send(self, array: Array) -> None:
        """Release the array after its send."""

    @abstractmethod
    def begin_receive(self, array: Array) -> tuple[Array, Event | None, Callable[[], object]]:
        """Return an array for MPI to receive into, an event, and a function to call afterwards.

        MPI may receive once the event is done (at once for None). After the call, later work on the
        current stream finds the received values in `array`.
        """


class Direct(Staging):
    """Passes the arrays themselves to a CUDA-aware MPI, once the GPU is done with them."""

    def begin_send(self, array: Array) -> tuple[Array, Event]:
        return array, self._now()

    def end_send(self, array: Array) -> None:
        pass

    def begin_receive(self, array: Array) -> tuple[Array, Event | None, Callable[[], object]]:
        return array, self._now(), lambda: None


class Staged(Staging):
    """Copies through pinned host memory, with one separate stream per direction.

    An array sent to several ranks is copied once. Memory: pinned, the size of the pending messages
    (each rounded up to a power of two).
    """

    def __init__(self, like: Array) -> None:
        super().__init__(like)
        with on_device(like):
            self._out = self._xp.cuda.Stream(non_blocking=True)
            self._in = self._xp.cuda.Stream(non_blocking=True)
        self._sending: dict[tuple[int, int, Any], _Copy] = {}
        self._receiving: deque[tuple[Event, HostArray]] = deque()  # read by pending copies
        # A copy may still read its pinned memory long after the last exchange on the host.
        weakref.finalize(self, _wait_for, self._receiving).atexit = False

    def begin_send(self, array: Array) -> tuple[Array, Event]:
        copy = self._sending.get(_place(array))
        if copy is None:
            copy = self._sending[_place(array)] = self._copy_out(array)
        copy.uses += 1
        return copy.host, copy.event

    def end_send(self, array: Array) -> None:
        copy = self._sending[_place(array)]
        copy.uses -= 1
        if copy.uses == 0:
            del self._sending[_place(array)]

    def begin_receive(self, array: Array) -> tuple[Array, Event | None, Callable[[], object]]:
        self._release()
        host, before = pinned_like(array), self._now()
        return host, None, partial(self._copy_in, array, host, before)

    def _copy_out(self, array: Array) -> _Copy:
        self._release()
        host = pinned_like(array)
        self._out.wait_event(self._now())
        array.data.copy_to_host_async(host.ctypes.data, array.nbytes, self._out)
        return _Copy(array, host, recorded(self._xp, self._out))

    def _copy_in(self, array: Array, host: HostArray, before: Event) -> None:
        """Copy received values to the GPU, after all work queued before the receive was posted.

        Args:
            before: event at the end of that earlier work.
        """
        self._in.wait_event(before)
        array.data.copy_from_host_async(host.ctypes.data, array.nbytes, self._in)
        copied = recorded(self._xp, self._in)
        self._xp.cuda.get_current_stream().wait_event(copied)
        self._receiving.append((copied, host))

    def _release(self) -> None:
        """Free pinned memory no longer read by any copy."""
        # bounded: as long as copies are done
        while self._receiving and is_done(self._xp, self._receiving[0][0]):
            self._receiving.popleft()


@dataclass(slots=True)
class _Copy:
    """Host copy of an array (kept alive), complete once the event is done."""

    array: Array
    host: HostArray
    event: Event
    uses: int = 0


def _place(array: Array) -> tuple[int, int, Any]:
    return array.data.ptr, array.size, array.dtype


def _wait_for(receiving: deque[tuple[Event, HostArray]]) -> None:
    for event, _ in receiving:
        # bounded: this rank's GPU: waiting ranks end the job
        event.synchronize()
