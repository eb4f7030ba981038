"""Arrays of a GPU through messages: nothing is sent, overwritten or read before its time.

On a stand-in for CuPy (`fake_cupy`) whose streams are late. Messages are those of a stand-in for
MPI that reads and writes buffers at any time until a request has ended, as MPI may; and those of
ranks without MPI, over pairs of sockets.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_cupy
import meshes
import numpy as np
import pytest

from parallel_sgd import Parameters, simulate
from parallel_sgd.communication.c10d.messages import MeshMessages
from parallel_sgd.communication.c10d.peer import MESSAGES
from parallel_sgd.communication.cuda.staged_messages import StagedMessages
from parallel_sgd.communication.liveness.finish import CollectiveCounter
from parallel_sgd.communication.mpi import messages as mpi_messages
from parallel_sgd.compression import codec_for
from parallel_sgd.exchange import Exchange, Topology

N = 1000


class Network:
    """What is on its way between ranks; it comes when somebody asks, in any order.

    Attributes:
        exact: whether messages fill the memory that they come into.
    """

    def __init__(self, seed: int = 0) -> None:
        self.lock, self.exact = threading.RLock(), True
        self.random = random.Random(seed)
        self.sends: list[Request] = []
        self.receives: list[Request] = []

    def deliver(self) -> None:
        with self.lock:
            for receive in self.random.sample(self.receives, len(self.receives)):
                fitting = [send for send in self.sends if send.key == receive.key]
                if fitting and self.random.random() < 0.5:
                    sent, room = fitting[0].buffer, receive.buffer
                    assert sent.nbytes <= room.nbytes
                    assert sent.nbytes == room.nbytes or not self.exact
                    room[: len(sent)] = sent
                    fitting[0].ended = receive.ended = True
                    self.sends.remove(fitting[0])
                    self.receives.remove(receive)


class Request:
    def __init__(self, network: Network, key: tuple[int, int, int], buffer: Any) -> None:
        self.network, self.key, self.buffer, self.ended = network, key, buffer, False

    @staticmethod
    def Testsome(requests: list[Request]) -> list[int]:
        requests[0].network.deliver()
        return [i for i, request in enumerate(requests) if request.ended]


class Comm:
    """One rank's view of the network, in place of mpi4py's."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def Isend(self, array: Any, peer: int, tag: int) -> Request:
        request = Request(self.network, (self.rank, peer, tag), array)
        self.network.sends.append(request)
        return request

    def Irecv(self, array: Any, peer: int, tag: int) -> Request:
        request = Request(self.network, (peer, self.rank, tag), array)
        with self.network.lock:
            self.network.receives.append(request)
        return request


class World:
    """A GPU and a network, in place of the real ones."""

    def __init__(self, monkeypatch: Any, seed: int) -> None:
        self.gpu, self.network = fake_cupy.Gpu(seed), Network(seed)
        self.meshes = meshes.meshes(4)
        self.cupy: Any = fake_cupy.cupy(self.gpu)
        monkeypatch.setattr(mpi_messages, "MPI", SimpleNamespace(Request=Request))
        fake_cupy.install(monkeypatch, self.cupy)

    def messages(self, rank: int, way: str = "staged") -> StagedMessages:
        watched: Any = lambda name, calls=None, awaited=None: contextlib.nullcontext()  # noqa: E731
        if way == "tcp":
            return MeshMessages(self.meshes[rank], watched)
        comm: Any = Comm(self.network, rank)
        calls = CollectiveCounter("world", (0, 1))
        return mpi_messages.MpiMessages(comm, watched, calls, cuda_aware=way == "cuda-aware")

    def forget_receives(self) -> None:
        self.network.receives.clear()
        for mesh in self.meshes:
            mesh.cancel(0, (MESSAGES, 8))

    def array(self, value: float) -> Any:
        return self.cupy.asarray(np.full(N, value, np.float32))


@pytest.fixture(params=range(5), ids="order {}".format)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch, request.param)
    yield world
    for mesh in world.meshes:
        mesh.close()


every_way = pytest.mark.parametrize("way", ["staged", "cuda-aware", "tcp"])
through_the_host = pytest.mark.parametrize("way", ["staged", "tcp"])


def finish(*messages: StagedMessages) -> None:
    for _ in range(10_000):
        if not any(side.under_way for side in messages):
            return
        for side in messages:
            side.progress()
    raise AssertionError("messages never end")


@every_way
def test_what_is_sent_is_what_the_stream_has_made_of_it(world: World, way: str) -> None:
    one, other = (world.messages(rank, way) for rank in range(2))
    sent, came = world.array(0), world.array(-1)
    other.receive(came, 0, 7, lambda: None)
    with world.gpu.late_stream() as stream:
        stream.do(lambda: sent.fill(5))
        one.send(sent, 1, 7, lambda: stream.do(lambda: sent.fill(6)))
        finish(one, other)
        stream.synchronize()
    assert (came == 5).all()
    assert (sent == 6).all()


@every_way
def test_an_array_is_left_alone_until_its_stream_is_done(world: World, way: str) -> None:
    one, other = (world.messages(rank, way) for rank in range(2))
    came, copies, gate = world.array(3), [], [False]
    one.send(world.array(5), 1, 7, lambda: None)
    with world.gpu.late_stream() as stream:
        stream.operations.append(lambda: gate[0])
        other.receive(came, 0, 7, lambda: stream.do(lambda: copies.append(came.copy())))
        for _ in range(200):
            one.progress()
            other.progress()
            world.gpu.advance()
        assert (came == 3).all()
        gate[0] = True
        finish(one, other)
        stream.synchronize()
    assert (copies[0] == 5).all()


@through_the_host
def test_an_array_for_several_ranks_is_copied_once(world: World, way: str) -> None:
    one = world.messages(0, way)
    others = [world.messages(rank, way) for rank in (1, 2, 3)]
    sent, came = world.array(5), [world.array(0) for _ in others]
    for rank, (other, array) in enumerate(zip(others, came, strict=True), 1):
        one.send(sent, rank, 7, lambda: None)
        other.receive(array, 0, 7, lambda: None)
    finish(one, *others)
    assert [where for where, _ in world.gpu.copies].count("out") == 1
    sent.fill(6)  # a new message
    again = world.array(0)
    one.send(sent, 1, 8, lambda: None)
    others[0].receive(again, 0, 8, lambda: None)
    finish(one, *others)
    assert all((array == 5).all() for array in came)
    assert (again == 6).all()


@through_the_host
def test_nothing_waits_for_the_gpu(world: World, way: str) -> None:
    """While a stream never gets on, every call returns."""
    one = world.messages(0, way)
    with world.gpu.late_stream() as stream:
        stream.operations.append(lambda: False)
        one.send(world.array(1), 1, 7, lambda: None)
        for _ in range(100):
            assert not one.progress()
    assert one.under_way == 1
    assert world.network.sends == []


@through_the_host
@pytest.mark.parametrize("gone", [False, True], ids=["in use", "gone"])
def test_pinned_memory_lives_until_it_has_been_read(world: World, gone: bool, way: str) -> None:
    """Also when the messages are gone before the GPU has come so far."""
    one, other = (world.messages(rank, way) for rank in range(2))
    came, gate = world.array(0), [False]
    one.send(world.array(5), 1, 7, lambda: None)
    with world.gpu.late_stream() as stream:
        stream.operations.append(lambda: gate[0])
        other.receive(came, 0, 7, lambda: None)
        finish(one, other)
    assert (came == 0).all()
    other.receive(world.array(0), 0, 8, lambda: None)  # lets go of what it may
    gate[0] = True
    if gone:
        del other
        world.forget_receives()
        gc.collect()
    stream.synchronize()
    assert (came == 5).all()


@through_the_host
def test_pinned_memory_is_given_back(world: World, way: str) -> None:
    one, other = (world.messages(rank, way) for rank in range(2))
    for tag in range(20):
        came = world.array(0)
        one.send(world.array(tag), 1, tag, lambda: None)
        other.receive(came, 0, tag, lambda: None)
        finish(one, other)
        assert (came == tag).all()
    given_back = [bool((memory == fake_cupy.RUBBISH).all()) for memory in world.gpu.pinned]
    assert given_back.count(False) <= 2


@through_the_host
def test_a_failed_gpu_is_not_waited_for(world: World, way: str) -> None:
    one = world.messages(0, way)
    one.send(world.array(1), 1, 7, lambda: None)
    world.gpu.failure = 700
    with pytest.raises(fake_cupy.Failed, match="CUDA error 700"):
        one.progress()


def test_numpy_arrays_go_as_they_are(world: World) -> None:
    one, other = (world.messages(rank) for rank in range(2))
    sent, came = np.arange(3.0), np.zeros(3)
    one.send(sent, 1, 7, lambda: None)
    other.receive(came, 0, 7, lambda: None)
    assert world.network.sends[0].buffer is sent
    assert world.network.receives[0].buffer is came
    finish(one, other)
    assert world.gpu.pinned == []


@every_way
@pytest.mark.parametrize(("bits", "code"), [(32, "auto"), (1, "sign"), (1, "entropy")])
@pytest.mark.parametrize("hosts", ["abc", "aab"])
@pytest.mark.usefixtures("small_pieces")
def test_a_pipeline_has_numpys_bits(
    world: World,
    bits: int,
    code: str,
    hosts: str,
    way: str,
) -> None:
    world.network.exact = code != "entropy"

    def sums(comm: Any, parameters: Parameters, gpu: bool) -> list[Any]:
        codec = None if bits == 32 else codec_for(bits, code=code, block_size=32)
        topology = Topology.over(hosts)
        exchange = Exchange(parameters, comm, codec, transport="pipelined", topology=topology)
        residuals = exchange.residuals(parameters) if codec else None
        totals = []
        for step in range(3):
            values = np.random.default_rng([comm.rank, step]).standard_normal(N, np.float32)
            vector = world.cupy.asarray(values) if gpu else values
            exchange.sum(vector, residuals)
            totals.append(np.array(vector))
        return [*totals, np.array(residuals.worker_error)] if residuals else totals

    def body(comm: Any) -> None:
        expected = sums(comm, Parameters({"x": np.zeros(N, np.float32)}), gpu=False)
        comm.messages = lambda: world.messages(comm.rank, way)
        there = Parameters({"x": world.cupy.zeros(N, np.float32)})
        on_gpu = sums(comm, there, gpu=True)
        assert all(np.array_equal(a, b) for a, b in zip(expected, on_gpu, strict=True))

    simulate(3, body, timeout_s=30)
    assert bool(world.gpu.copies) == (way != "cuda-aware")
