"""Messages between ranks without MPI: what is sent comes, in order, or the end of a rank is found.

Ranks are meshes of one process, connected by pairs of sockets.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import defaultdict, deque
from typing import Any

import meshes
import numpy as np
import pytest
from limits import patience
from meshes import in_threads, on_ranks, until

from parallel_sgd.communication.c10d.communicator import MOST_DIRECT, C10dCommunicator
from parallel_sgd.communication.c10d.mesh import Mesh
from parallel_sgd.communication.c10d.peer import COLLECTIVES, ENDPOINT, MESSAGES, Key
from parallel_sgd.errors import PeerFailure, UserError

KEY = MESSAGES, 7


def content(*numbers: int, nbytes: int) -> bytes:
    return np.random.default_rng(numbers).integers(0, 256, nbytes, np.uint8).tobytes()


class Stingy:
    """A socket that takes and gives a few bytes at a time, or none."""

    def __init__(self, connection: Any, order: random.Random) -> None:
        self.connection, self.order = connection, order
        self.fileno, self.close, self.send = connection.fileno, connection.close, connection.send

    def few(self) -> int:
        if self.order.random() < 0.3:
            raise BlockingIOError
        return self.order.choice([1, 5, 23, 24, 25, 200, 3000])

    def recv_into(self, into: memoryview) -> int:
        return int(self.connection.recv_into(into[: self.few()]))

    def sendmsg(self, parts: list[memoryview]) -> int:
        return int(self.connection.send(b"".join(parts)[: self.few()]))


@pytest.mark.parametrize("seed", range(40))
def test_messages_come_as_sent_and_in_order(seed: int) -> None:
    """Of several keys, to all ranks and to the same one, received before and after they come."""
    order, size, keys = random.Random(seed), 3, [(c, t) for c in (0, 1, 2) for t in (-1, 4)]
    ends = meshes.connections(size)
    ranks = [
        Mesh(k, {peer: Stingy(end, order) for peer, end in mine.items()}, range(size))  # type: ignore[misc]
        for k, mine in enumerate(ends)
    ]
    routes = [(source, to, key) for source in range(size) for to in range(size) for key in keys]
    todo: list[tuple[str, tuple[int, int, Key]]] = []
    for route in order.sample(routes, 20):
        todo += [(what, route) for what in ("send", "receive")] * order.randrange(6)
    order.shuffle(todo)
    sent: dict[Any, list[bytes]] = defaultdict(list)
    came: dict[Any, list[bytes]] = defaultdict(list)
    left = len(todo)

    def gone(buffer: bytearray) -> None:
        nonlocal left
        left -= 1
        buffer[:] = bytes(len(buffer))  # may be used again

    def arrived(route: Any, room: memoryview | None, data: memoryview) -> None:
        nonlocal left
        left -= 1
        came[route].append(data.tobytes())
        assert room is None or room[: data.nbytes] == data

    for number, (what, (source, to, key)) in enumerate(todo):
        route = source, to, key
        if what == "send":
            nbytes = order.choice([0, 0, 1, 24, 100, 5000])
            data = bytearray(content(seed, number, nbytes=nbytes))
            sent[route].append(bytes(data))
            ranks[source].send(memoryview(data), to, key, lambda data=data: gone(data))  # type: ignore[misc]
        else:
            room = order.choice([None, memoryview(bytearray(5000 + order.randrange(9)))])
            ranks[to].receive(
                room, source, key, lambda data, route=route, room=room: arrived(route, room, data)
            )
        for _ in range(order.randrange(4)):
            ranks[order.randrange(size)].drive()
    until(lambda: left == 0, ranks)
    assert came == sent and len(todo) > 10
    assert [mesh.awaited(channel) for mesh in ranks for channel in (0, 1, 2)] == [[]] * 9
    assert [mesh.unreceived(channel) for mesh in ranks for channel in (0, 1, 2)] == [[]] * 9
    for mesh in ranks:
        mesh.close()


@pytest.mark.parametrize("seed", range(3))
def test_threads_share_a_mesh(seed: int) -> None:
    """Messages far larger than the buffers, of two threads of each rank, in both directions."""
    pair = meshes.meshes(2)

    def thread(mesh: Mesh, channel: int) -> list[bytes]:
        order, peer = random.Random(channel), 1 - mesh.rank
        sizes = [order.choice([0, 3, 70_000, 900_000]) for _ in range(15)]
        came: list[bytes] = []
        left = 2 * len(sizes)
        done: deque[int] = deque()
        for number, nbytes in enumerate(sizes):
            data = memoryview(content(seed, mesh.rank, channel, number, nbytes=nbytes))
            mesh.send(data, peer, (channel, 1), lambda: done.append(1))

        def arrived(data: memoryview) -> None:
            came.append(data.tobytes())
            done.append(1)

        for nbytes in sizes:
            mesh.receive(memoryview(bytearray(nbytes)), peer, (channel, 1), arrived)
        began = time.monotonic()
        while left > len(done):
            assert time.monotonic() - began < 20 * patience()
            mesh.require_connected(channel, "a test")
            mesh.drive()
            mesh.idle(1e-3)
        return [data == content(seed, peer, channel, n, nbytes=len(data))
                and len(data) == sizes[n] for n, data in enumerate(came)]  # fmt: skip

    bodies = [lambda m=mesh, c=channel: thread(m, c) for mesh in pair for channel in (0, 1)]  # type: ignore[misc]
    assert in_threads(bodies) == [[True] * 15] * 4


def send(mesh: Mesh, peer: int, data: bytes, key: Key = KEY) -> list[int]:
    """Begin to send; the list has an item once it is done."""
    done: list[int] = []
    mesh.send(memoryview(data), peer, key, lambda: done.append(1))
    return done


def receive(mesh: Mesh, peer: int, key: Key = KEY, room: int | None = None) -> list[bytes]:
    """Begin to receive; the list has the bytes once they have come."""
    came: list[bytes] = []
    into = None if room is None else memoryview(bytearray(room))
    mesh.receive(into, peer, key, lambda data: came.append(data.tobytes()))
    return came


def drive(*ranks: Mesh) -> None:
    for _ in range(200):
        for mesh in ranks:
            mesh.drive()


def test_too_much_is_not_kept() -> None:
    """The sender waits; each receive lets more in."""
    one, other = meshes.meshes(2, most_kept=100_000)
    sent = [send(one, 1, bytes([k]) * 60_000) for k in range(10)]
    drive(one, other)
    assert sum(map(len, sent)) < 5 and other._peers[0].kept_bytes == 120_000
    for k in range(10):
        came = receive(other, 0)
        until(lambda came=came: came, (one, other))
        assert came == [bytes([k]) * 60_000]
        drive(one, other)
        assert other._peers[0].kept_bytes <= 120_000
    assert sum(map(len, sent)) == 10


@pytest.mark.parametrize("key", [(ENDPOINT, 1), (MESSAGES, 9), (COLLECTIVES, 2)])
@pytest.mark.parametrize("first", [False, True], ids=["posted later", "posted first"])
def test_an_awaited_message_comes_behind_too_much(key: Key, first: bool) -> None:
    """All before it is kept, and so there is no wait without an end; then no more is."""
    one, other = meshes.meshes(2, most_kept=100_000)
    came = receive(other, 0, key) if first else []
    for _ in range(10):
        send(one, 1, bytes(60_000))
    send(one, 1, b"x" * 90_000, key)
    after = [send(one, 1, bytes(60_000)) for _ in range(10)]
    if not first:
        drive(one, other)
        came = receive(other, 0, key)

    def has_come() -> bool:
        send(other, 0, b"what is sent meanwhile does not end the reading")
        return bool(came)

    until(has_come, (one, other))
    assert came == [b"x" * 90_000]
    drive(one, other)
    assert other._peers[0].kept_bytes == 600_000 and sum(map(len, after)) < 3


def test_an_endpoint_takes_all_its_messages() -> None:
    """As long as it listens."""
    one, other = meshes.meshes(2, most_kept=1000)
    receive(other, 0, (ENDPOINT, 1))
    sent = [send(one, 1, bytes(60_000), (ENDPOINT, 2)) for _ in range(10)]
    until(lambda: all(sent), (one, other))
    drive(other)
    assert other._peers[0].kept_bytes == 600_000
    other.cancel(0, (ENDPOINT, 1))
    late = [send(one, 1, bytes(60_000), (ENDPOINT, 2)) for _ in range(3)]
    drive(one, other)
    assert not all(late)


@pytest.mark.parametrize("early", [False, True], ids=["awaited", "early"])
def test_a_message_longer_than_its_room(early: bool) -> None:
    """It is an error, and is dropped: later messages come."""
    one, other = meshes.meshes(2)
    text = "rank 10 has sent 50000 bytes, but this rank expects 3: arrays must have the same size"
    if early:
        sent = send(one, 1, bytes(50_000))
        until(lambda: sent, (one, other))
        drive(other)
        with pytest.raises(UserError, match=text):
            receive(other, 0, room=3)
    else:
        receive(other, 0, room=3)
        send(one, 1, bytes(50_000))
        with pytest.raises(UserError, match=text):
            drive(one, other)
    came = receive(other, 0, room=9)
    send(one, 1, b"more")
    until(lambda: came, (one, other))
    assert came == [b"more"] and other._peers[0].kept_bytes == 0


@pytest.mark.parametrize("found_by", ["receiving", "sending", "sending while it keeps too much"])
@pytest.mark.parametrize("finished", [True, False])
def test_the_end_of_a_rank(finished: bool, found_by: str) -> None:
    """Whether it has said that it needs no more; what came before its end can be received."""
    one, other = meshes.meshes(2, most_kept=10)
    last = b"last" * (10 if "much" in found_by else 1)
    sent = send(one, 1, last)
    assert sent
    if "much" in found_by:
        drive(other)
        assert other._peers[0].events == 0
    if finished:
        one.close()
    else:
        one._closed()
    if found_by == "receiving":
        drive(other)
    else:
        for _ in range(3):  # a system may take the first
            if not other._lost:
                send(other, 0, bytes(60_000))
    assert other.finished == ([0] if finished else [])
    error = UserError if finished else PeerFailure
    text = (
        r"^rank 11 waits in some wait for rank 10, which has finished \(the program has ended"
        if finished
        else r"^rank 10 .*has failed or was killed: found in some wait \(.+\)$"
    )
    assert receive(other, 0) == [last]
    if found_by == "receiving":
        other.require_connected(MESSAGES, "some wait")  # nothing is awaited
    receive(other, 0, (COLLECTIVES, 0))
    with pytest.raises(error, match=text) as caught:
        other.require_connected(COLLECTIVES, "some wait")
    assert type(caught.value) is error and "\n" not in str(caught.value)
    if found_by == "receiving":
        other.require_connected(MESSAGES, "some wait")
    with pytest.raises(error):
        send(other, 0, b"")
    failure = other.failure("some wait")
    assert failure is None if finished else re.match(text, str(failure))
    if finished:
        with pytest.raises(UserError, match=text):
            other.require_unfinished(0, "some wait")
    else:
        other.require_unfinished(0, "some wait")


def test_a_closed_mesh() -> None:
    one, other = meshes.meshes(2)
    receive(other, 0)
    other.close()
    other.close()
    other.say_end()
    for use in (lambda: send(other, 0, b"x"), lambda: receive(other, 0), other.drive):
        with pytest.raises(UserError, match="the connections of this communicator are closed"):
            use()
    drive(one)
    assert one.finished == [1]


def test_a_rank_that_is_forgotten_closes_its_connections() -> None:
    one, other = meshes.meshes(2)
    receive(one, 1)
    del other
    with pytest.raises(PeerFailure):
        until(lambda: one.require_connected(MESSAGES, "a wait"), [one])


def test_a_forked_child_has_no_connection() -> None:
    """So it cannot use them, and does not hide the end of its parent: a rank in a fork of ours."""
    ((_, own), (_, theirs)) = (ends.popitem() for ends in meshes.connections(2))
    told, tell = os.pipe()
    rank = os.fork()
    if rank == 0:
        code = 1
        try:
            own.close()
            mesh = Mesh(1, {0: theirs}, [10, 11])
            holds = threading.Event()
            threading.Thread(
                target=lambda: (mesh._lock.acquire() and holds.set()) or time.sleep(60), daemon=True
            ).start()
            holds.wait(10)
            if os.fork() == 0:
                use(mesh, tell)
                code = 0
            else:
                time.sleep(60)  # until it is killed
        finally:
            os._exit(code)
    theirs.close()
    os.close(tell)
    mesh = Mesh(0, {1: own}, [10, 11])
    receive(mesh, 1)
    child, said = 0, os.read(told, 1000).decode()
    try:
        child, text = int(said.partition(" ")[0]), said.partition(" ")[2]
        assert text.startswith("the connections of this communicator are closed: after close()")
        mesh.require_connected(MESSAGES, "a wait")
    finally:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    with pytest.raises(PeerFailure, match=r"rank 11 .*found in a wait"):
        until(lambda: mesh.require_connected(MESSAGES, "a wait"), [mesh], seconds=1)
    os.kill(child, 0)  # it lives
    os.kill(child, signal.SIGKILL)


def use(mesh: Mesh, tell: int) -> None:
    """What a child does: it says its number and the error, and lives on."""
    try:
        send(mesh, 0, b"x")
    except UserError as error:
        os.write(tell, f"{os.getpid()} {error}".encode())
    os.close(tell)
    time.sleep(60)


def words(ends: list[Any]) -> list[str]:
    return [f"{type(end).__name__}: {end}" for end in ends]


def test_different_collectives() -> None:
    def body(comm: C10dCommunicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            comm.broadcast(np.zeros(4, np.uint8))
        comm.allgather(np.zeros(2), np.zeros(4), [2, 2])

    orders = "rank 11: allgather; rank 10: broadcast", "rank 10: broadcast; rank 11: allgather"
    text = words(on_ranks(2, body))
    called = "the ranks have called different collectives, and would wait for each other: "
    found = {f"UserError: {called}{calls}" for calls in orders}
    assert found & {*text}, text
    assert all("it never ends" not in line and line != "NoneType: None" for line in text)


def test_a_different_collective_that_came_early() -> None:
    """While this rank was still in the collective before."""
    first = threading.Event()

    def body(comm: C10dCommunicator) -> None:
        peer = 1 - comm.rank
        if comm.rank == 1:
            comm.barrier()
            comm.broadcast(np.zeros(4, np.uint8), root=1)
            first.set()
            comm.sum_integers(np.zeros(1, np.int64))
            return
        comm.barrier()
        assert first.wait(10)
        until(lambda: comm._mesh.unreceived(COLLECTIVES), [comm._mesh])
        assert {rank for rank, _ in comm._mesh.unreceived(COLLECTIVES)} == {peer}
        comm.allgather(np.zeros(2), np.zeros(4), [2, 2])

    text = words(on_ranks(2, body))
    assert "rank 10: allgather; rank 11: broadcast" in text[0], text
    assert "rank 10" in text[1] and ("failed" in text[1] or "finished" in text[1]), text


@pytest.mark.parametrize("call", ["allgather", "alltoall", "broadcast"])
def test_different_counts(call: str) -> None:
    def body(comm: C10dCommunicator) -> None:
        count = 2 + comm.rank
        values, other = np.zeros(count), np.zeros(2 * count)
        if call == "allgather":
            comm.allgather(values, other, [count, count])
        elif call == "alltoall":
            comm.alltoall(other, [count, count], np.zeros(2 * count), [count, count])
        else:
            comm.broadcast(values)

    text = words(on_ranks(2, body))
    assert "rank 10 has sent 16 bytes, but this rank expects 24: arrays must have" in text[1]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("nbytes", [0, 48, MOST_DIRECT, MOST_DIRECT + 16, 300_016])
def test_broadcasts_of_every_size(size: int, nbytes: int) -> None:
    """In parts beyond some size, and from every root."""

    def body(comm: C10dCommunicator) -> list[bool]:
        good = []
        for root in range(size):
            expected = np.frombuffer(content(root, nbytes=nbytes), np.int64).reshape(-1, 2)
            array = expected.copy() if comm.rank == root else np.full_like(expected, -1)
            comm.broadcast(array, root)
            good.append(np.array_equal(array, expected))
        return good

    assert on_ranks(size, body) == [[True] * size] * size


def test_parts_and_duplicates_have_connections_of_their_own() -> None:
    """Over TCP; a closed one is refused, the others go on."""

    def body(comm: C10dCommunicator) -> Any:
        with comm.split(comm.rank % 2) as part, comm.duplicate() as twin:
            total = part.sum_integers(np.array([10**comm.rank]))
            comm.barrier()
            whole = twin.sum_integers(np.array([10**comm.rank]))
            ranks = tuple(part.world_ranks)
        with pytest.raises(UserError, match="this communicator is closed"):
            part.barrier()
        comm.barrier()
        return ranks, int(total[0]), int(whole[0])

    even, odd = ((10, 12), 101, 1111), ((11, 13), 1010, 1111)
    assert on_ranks(4, body) == [even, odd, even, odd]
