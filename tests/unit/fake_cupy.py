"""A stand-in for CuPy whose streams are late: copies run when the GPU is asked, in any order.

It has what staging and NCCL's transport use. A stream works off its operations one by one, one of
all streams whenever somebody asks for an event; what NumPy computes on these arrays is done at
once, on a current stream that is never late unless a test puts a `late_stream` in its place.
Pinned memory is filled with rubbish when it is given back, and copies go by raw addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from parallel_sgd import kernels
from parallel_sgd.kernels import reference

RUBBISH = 0xAA
NOT_READY = 600


class Gpu:
    """One chip of all ranks of a test.

    Attributes:
        failure: what queries answer once the GPU has failed; 0 before.
        copies: (way, bytes) of all so far.
    """

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.events: dict[int, Event] = {}
        self.failure = 0
        self.copies: list[tuple[str, int]] = []
        self.pinned: list[Any] = []
        self.local = threading.local()

    def advance(self) -> bool:
        """Do one operation of some stream; whether there was any that could be done."""
        with self.lock:
            streams = [stream for stream in self.streams if stream.operations]
            self.random.shuffle(streams)
            for stream in streams:
                if stream.operations[0]():
                    stream.operations.popleft()
                    return True
            return False

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            if not self.advance():  # another rank has to come first
                threading.Event().wait(1e-4)

    def query(self, event: int) -> int:
        with self.lock:
            if self.failure:
                return self.failure
            if self.random.random() < 0.4:
                self.advance()
            return 0 if self.events[event].done else NOT_READY

    @contextlib.contextmanager
    def late_stream(self, stream: Stream | None = None) -> Iterator[Stream]:
        """One, or another one, in place of the current stream of this thread."""
        stream = self.local.stream = stream or Stream(self)
        try:
            yield stream
        finally:
            del self.local.stream

    def current(self) -> Stream:
        stream: Stream | None = getattr(self.local, "stream", None)
        if stream is None:
            stream = self.local.punctual = getattr(self.local, "punctual", Punctual(self))
        return stream


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.done = gpu, True
        self.ptr = len(gpu.events) + 1
        gpu.events[self.ptr] = self

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: self.done)


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.operations: deque[Callable[[], bool]] = deque()
        with gpu.lock:
            gpu.streams.append(self)
            self.ptr = len(gpu.streams)

    def do(self, function: Callable[[], object]) -> None:
        self.operations.append(lambda: (function(), True)[1])

    def record(self, event: Event) -> Event:
        event.done = False
        self.do(lambda: setattr(event, "done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.operations.append(lambda: event.done)

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.operations)


class Punctual(Stream):
    """Never late: for what NumPy does at once."""

    def record(self, event: Event) -> Event:
        return event

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Failed(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")


class Pinned(np.ndarray):
    """Of a type of its own: what is made of it keeps it, and not only its memory."""


def at(address: int, nbytes: int) -> Any:
    """The bytes at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def cupy(gpu: Gpu, bus_id: Callable[[int], str] = lambda device: "0000:01:00.0") -> ModuleType:
    """The module that takes CuPy's place; NCCL is not in it."""

    class Memory:
        def __init__(self, array: Any) -> None:
            self.ptr = array.ctypes.data

        def copy_to_host_async(self, address: int, nbytes: int, stream: Stream) -> None:
            self._copy("out", address, self.ptr, nbytes, stream)

        def copy_from_host_async(self, address: int, nbytes: int, stream: Stream) -> None:
            self._copy("in", self.ptr, address, nbytes, stream)

        def _copy(self, way: str, to: int, source: int, nbytes: int, stream: Stream) -> None:
            gpu.copies.append((way, nbytes))
            stream.do(lambda: ctypes.memmove(to, source, nbytes))

    class ndarray(np.ndarray):
        @property
        def data(self) -> Any:
            return Memory(self)

        @property
        def device(self) -> Any:
            class Device(contextlib.nullcontext):  # type: ignore[type-arg]
                id = 0

            return Device()

        def get(self, stream: Stream | None = None, out: Any = None) -> Any:
            if out is None:
                return np.array(self)
            assert stream and (out.size, out.dtype) == (self.size, self.dtype)
            self.data.copy_to_host_async(out.ctypes.data, self.nbytes, stream)
            return out

        def set(self, array: Any) -> None:
            assert (array.size, array.dtype) == (self.size, self.dtype)
            self.data.copy_from_host_async(array.ctypes.data, self.nbytes, gpu.current())

    def alloc_pinned_memory(nbytes: int) -> Any:
        kept = np.full(nbytes + 100, RUBBISH, np.uint8).view(Pinned)  # a pool gives more
        gpu.pinned.append(kept)
        given = kept.view()
        weakref.finalize(given, kept.fill, RUBBISH).atexit = False
        return given

    module: Any = ModuleType("cupy")
    module.ndarray = ndarray
    module.empty = lambda size, dtype: np.full(size, RUBBISH, np.uint8).astype(dtype).view(ndarray)
    module.zeros = lambda size, dtype: np.zeros(size, dtype).view(ndarray)
    module.asarray = lambda array: np.array(array).view(ndarray)
    module.add = np.add
    module.concatenate = np.concatenate
    module.cuda = SimpleNamespace(
        Event=lambda disable_timing: Event(gpu),
        Stream=lambda non_blocking: Stream(gpu),
        alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=gpu.current,
        runtime=SimpleNamespace(
            eventQuery=gpu.query, CUDARuntimeError=Failed, deviceGetPCIBusId=bus_id
        ),
    )
    return module  # type: ignore[no-any-return]


def install(monkeypatch: Any, fake: Any) -> None:
    """Make a stand-in this process's CuPy; its kernels are those of the reference."""
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(kernels, "_load", lambda name: reference)
