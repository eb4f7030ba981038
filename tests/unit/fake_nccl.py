"""A stand-in for NCCL on GPUs of `fake_cupy`, and hosts of such GPUs whose ranks are threads.

Collectives run in the GPU's late streams, when all ranks have come to them, and add in another
order than ours; calls that differ between ranks are refused. Messages are sent in groups.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import fake_cupy
import numpy as np
import pytest

from parallel_sgd import Parameters, simulate

SHAPES = {"W": (20, 37), "b": (37,), "V": (300,)}


class NcclError(RuntimeError):
    pass


@dataclass
class Message:
    """One side of a message: its sender and receiver, and its bytes."""

    side: str
    route: tuple[int, int]
    place: int
    nbytes: int
    done: bool = False


class Meeting:
    """What the ranks of one communicator have been asked to do, call by call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: dict[int, dict[int, tuple[Any, ...]]] = {}
        self.messages: dict[tuple[int, int], dict[str, deque[Message]]] = {}
        self.error: str | None = None

    def post(self, message: Message) -> None:
        """Begin one side of a message; when both have come, its bytes are copied."""
        sides = self.messages.setdefault(message.route, {"send": deque(), "recv": deque()})
        sides[message.side].append(message)
        if sides["send"] and sides["recv"]:
            sent, received = sides["send"].popleft(), sides["recv"].popleft()
            if sent.nbytes != received.nbytes:
                self.error = f"{sent.nbytes} bytes for {received.nbytes} at {message.route}"
                return
            place = fake_cupy.at(received.place, received.nbytes)
            place[...] = fake_cupy.at(sent.place, sent.nbytes)
            sent.done = received.done = True

    def arrive(self, number: int, rank: int, size: int, call: tuple[Any, ...]) -> bool:
        """Whether all ranks are here; the last one to come does the work of all."""
        with self.lock:
            calls = self.calls.setdefault(number, {})
            if rank not in calls:
                calls[rank] = call
                if len(calls) == size:
                    self.work([calls[k] for k in range(size)])
            return len(calls) == size

    def work(self, calls: list[tuple[Any, ...]]) -> None:
        kinds = {(name, count, dtype, root) for name, _, count, dtype, root in calls}
        if len(kinds) > 1:
            self.error = f"ranks called differently: {kinds}"
            return
        ((name, count, dtype, root),) = kinds
        places = [fake_cupy.at(at, count * dtype.itemsize).view(dtype) for _, at, *_ in calls]
        result = sum(place.copy() for place in reversed(places)) if name == "sum" else places[root]
        for place in places:
            place[...] = result


def fake_nccl(gpu: fake_cupy.Gpu, *, dies: Callable[[int], bool] = lambda rank: False) -> Any:
    """The module that takes NCCL's place.

    Args:
        dies: whether a rank never comes to a collective.
    """
    meetings: dict[Any, Meeting] = {}
    streams = lambda address: next(s for s in gpu.streams if s.ptr == address)  # noqa: E731

    groups = threading.local()

    def start() -> None:
        groups.messages = []

    def group() -> list[tuple[NcclCommunicator, int, Message]]:
        return groups.messages  # type: ignore[no-any-return]

    def end() -> None:
        messages, groups.messages = group(), None
        for comm, stream in {(comm, stream) for comm, stream, _ in messages}:
            comm.exchange(stream, [m for c, s, m in messages if (c, s) == (comm, stream)])

    class NcclCommunicator:
        def __init__(self, size: int, identity: Any, rank: int) -> None:
            self.meeting = meetings.setdefault(identity, Meeting())
            self.size, self.rank, self.calls, self.aborted = size, rank, 0, False

        def allReduce(
            self, source: int, to: int, count: int, kind: Any, add: str, stream: int
        ) -> None:
            assert source == to and add == "NCCL_SUM"
            self.enqueue(stream, ("sum", to, count, kind, None))

        def broadcast(
            self, source: int, to: int, count: int, kind: Any, root: int, stream: int
        ) -> None:
            assert source == to and 0 <= root < self.size
            self.enqueue(stream, ("broadcast", to, count, kind, root))

        def send(self, place: int, count: int, kind: Any, peer: int, stream: int) -> None:
            nbytes = count * kind.itemsize
            group().append((self, stream, Message("send", (self.rank, peer), place, nbytes)))

        def recv(self, place: int, count: int, kind: Any, peer: int, stream: int) -> None:
            nbytes = count * kind.itemsize
            group().append((self, stream, Message("recv", (peer, self.rank), place, nbytes)))

        def exchange(self, stream: int, messages: list[Message]) -> None:
            """Do a group of messages: none has to come before another."""
            posted = False

            def operation() -> bool:
                nonlocal posted
                with self.meeting.lock:
                    for message in () if posted else messages:
                        self.meeting.post(message)
                    posted = True
                    return all(message.done for message in messages)

            streams(stream).operations.append(operation)

        def enqueue(self, stream: int, call: tuple[Any, ...]) -> None:
            number, self.calls = self.calls, self.calls + 1
            if dies(self.rank):
                streams(stream).operations.append(lambda: False)
            operation = lambda: self.meeting.arrive(number, self.rank, self.size, call)  # noqa: E731
            streams(stream).operations.append(operation)

        def check_async_error(self) -> None:
            if self.meeting.error:
                raise NcclError(self.meeting.error)

        def abort(self) -> None:
            module.aborted.append(self.rank)

        def destroy(self) -> None:
            module.destroyed.append(self.rank)

    module: Any = ModuleType("cupy.cuda.nccl")
    identities = iter(range(100))
    module.aborted, module.destroyed, module.meetings = [], [], meetings
    module.available, module.NcclError, module.NCCL_SUM = True, NcclError, "NCCL_SUM"
    module.NCCL_FLOAT32, module.NCCL_FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
    module.NCCL_UINT8 = np.dtype(np.uint8)
    module.get_unique_id = lambda: next(identities)
    module.groupStart, module.groupEnd = start, end
    module.NcclCommunicator = NcclCommunicator
    return module


class Machine:
    """A GPU for each rank of a few hosts; rank k has the GPU `buses[k]`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = fake_cupy.Gpu(seed=1)
        self.rank, self.buses = threading.local(), [f"0000:0{k}:00.0" for k in range(8)]
        self.cupy: Any = fake_cupy.cupy(self.gpu, lambda device: self.buses[self.rank.number])
        self.nccl = fake_nccl(self.gpu)
        fake_cupy.install(monkeypatch, self.cupy)
        self._set = monkeypatch.setitem
        self.use(self.nccl)

    def use(self, nccl: Any) -> None:
        self.nccl = nccl
        self._set(sys.modules, "cupy.cuda.nccl", nccl)

    def simulate(self, hosts: str, body: Callable[[Any], Any], timeout_s: float = 30) -> list[Any]:
        def on_host(comm: Any) -> Any:
            self.rank.number = comm.rank
            comm._hosts = list(hosts)
            return body(comm)

        return simulate(len(hosts), on_host, timeout_s=timeout_s)

    def zeros(self, dtype: Any = np.float32) -> Parameters:
        return Parameters({n: self.cupy.zeros(s, dtype) for n, s in SHAPES.items()})
