"""Connections between ranks without MPI: only ranks are connected, each once, in bounded time."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits import patience
from meshes import in_threads

from parallel_sgd.communication.c10d import connections as module
from parallel_sgd.communication.c10d.connections import Listener, Offer
from parallel_sgd.communication.network_interfaces import Interface
from parallel_sgd.errors import UserError

TOKEN = bytes(range(16))


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.5)


def connected(
    size: int,
    *,
    timeout_s: float = 10,
    missing: tuple[int, ...] = (),
    change: Callable[[list[Offer]], object] = lambda offers: None,
    during: Callable[[list[Offer]], object] = lambda offers: None,
) -> list[Any]:
    """The connections of ranks that are threads, or their errors, by rank.

    Args:
        missing: ranks that have made an offer, and then do nothing.
        change: may change the offers that all ranks see.
        during: called just before they connect.
    """
    listeners = [Listener() for _ in range(size)]
    offers = [listener.offer for listener in listeners]
    change(offers)

    def rank(k: int) -> Any:
        with listeners[k] as listener:
            return {} if k in missing else listener.connect(k, offers, timeout_s)

    during(offers)
    began = time.monotonic()
    results = in_threads([lambda k=k: rank(k) for k in range(size)])  # type: ignore[misc]
    assert time.monotonic() - began < (timeout_s + 5) * patience()
    return results


def require_whole(results: list[Any]) -> None:
    """Every rank has one connection to each other rank, which leads there."""
    size = len(results)
    assert [sorted(mine) for mine in results] == [
        [peer for peer in range(size) if peer != k] for k in range(size)
    ], results
    for k, mine in enumerate(results):
        for peer, connection in mine.items():
            assert connection.gettimeout() == 0.0
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            connection.send(bytes([k, peer]))
    for k, mine in enumerate(results):
        for peer, connection in mine.items():
            connection.settimeout(5)
            assert connection.recv(2) == bytes([peer, k])
            connection.close()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_two_ranks_are_connected(size: int) -> None:
    require_whole(connected(size))


def test_other_programs_at_the_port_are_left_out() -> None:
    """Many that say nothing, and some that say what no rank would."""
    strangers: list[socket.socket] = []

    def come(offers: list[Offer]) -> None:
        for said in [b""] * 30 + [
            b"GET / HTTP/1.1\r\n\r\n" + bytes(20),
            module._HELLO.pack(TOKEN, 2),
            module._HELLO.pack(offers[0].token, 3),
            module._HELLO.pack(offers[0].token, -1),
            b"short",
        ]:
            stranger = socket.create_connection(("127.0.0.1", offers[0].port), timeout=5)
            stranger.sendall(said)
            strangers.append(stranger)

    began = time.monotonic()
    require_whole(connected(3, during=come))
    assert time.monotonic() - began < 3 * patience()  # 30 of them would take 15 s in turn
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(100) == b""
        stranger.close()


def test_a_caller_that_has_given_up_is_no_connection() -> None:
    """It has shown the right token, but has not waited for the proof; its next attempt counts."""

    def come(offers: list[Offer]) -> None:
        for _ in range(3):
            early = socket.create_connection(("127.0.0.1", offers[0].port), timeout=5)
            early.sendall(module._HELLO.pack(offers[0].token, 1))
            early.close()

    for _ in range(5):
        require_whole(connected(2, during=come))


class Impostor:
    """Listens at an address that rank 0 says is its own, and answers as it likes."""

    def __init__(self, answer: bytes) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port, self.answer, self.callers = self.server.getsockname()[1], answer, 0
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                caller, _ = self.server.accept()
            except OSError:
                return
            self.callers += 1
            caller.sendall(self.answer)
            caller.recv(100)
            caller.close()

    def stop(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


@pytest.mark.parametrize(
    "answer", [b"", TOKEN, b"220 mail ready\r\n"], ids=["silent", "16", "text"]
)
def test_another_machine_at_the_same_address(answer: bytes) -> None:
    """Whoever does not prove to be the rank is not taken for it."""
    impostor = Impostor(answer)

    def move(offers: list[Offer]) -> None:
        offers[0] = offers[0]._replace(port=impostor.port, addresses=("127.0.0.1",))

    zero, one = connected(2, timeout_s=1, change=move)
    impostor.stop()
    assert impostor.callers > 0
    assert isinstance(one, UserError)
    assert str(one) == (
        f"rank 1 cannot reach rank 0 (127.0.0.1, port {impostor.port}: another program answers): "
        "GLOO_SOCKET_IFNAME selects another network interface"
    )
    assert isinstance(zero, UserError) and "no connection from rank 1 to rank 0 at" in str(zero)


def test_a_rank_that_never_connects() -> None:
    zero, one, two = connected(3, timeout_s=0.5, missing=(2,))
    assert two == {}
    assert isinstance(zero, UserError) and isinstance(one, UserError)
    assert str(zero).startswith("no connection from rank 2 to rank 0 at 127.0.0.1")
    assert str(zero).endswith("within 0.5 s: GLOO_SOCKET_IFNAME selects another network interface")
    assert str(one).startswith("no connection from rank 2 to rank 1 at ")


def test_a_rank_that_has_ended() -> None:
    zero, one = connected(2, timeout_s=0.5, missing=(0,))
    assert zero == {}
    assert isinstance(one, UserError)
    assert str(one).startswith("rank 1 cannot reach rank 0 (") and "refused" in str(one)


def test_the_addresses_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its loopback addresses, nor those that this host has, too; near networks come first."""
    mine = [Interface("lo", ipaddress.IPv4Interface("127.0.0.1/8"), True)]
    mine += [Interface("docker0", ipaddress.IPv4Interface("172.17.0.1/16"))]
    mine += [Interface("eth0", ipaddress.IPv4Interface("10.0.0.5/24"))]
    monkeypatch.setattr(module, "interfaces", lambda: mine)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    own = module._addresses()
    assert own == ("127.0.0.1", "172.17.0.1", "10.0.0.5")
    theirs = ("127.0.0.1", "192.168.9.9", "172.17.0.1", "10.0.0.6")
    assert module._remote(theirs, own) == ["10.0.0.6", "192.168.9.9"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,docker0")
    assert module._addresses() == ("172.17.0.1", "10.0.0.5")


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(UserError, match=r"^GLOO_SOCKET_IFNAME='eth77' must name an interface with"):
        Listener()


def test_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """It connects ranks of one machine, and no others, as a host without IPv4 has it too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    require_whole(connected(2))

    def apart(offers: list[Offer]) -> None:
        offers[0] = offers[0]._replace(machine="another")

    _, one = connected(2, timeout_s=0.5, change=apart)
    assert str(one) == (
        "rank 1 cannot reach rank 0 (it has no IPv4 address for other machines): "
        "GLOO_SOCKET_IFNAME selects another network interface"
    )


FILES = """
import resource, sys
from parallel_sgd.communication.c10d.connections import Listener
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
with Listener() as listener:
    offers = [listener.offer] * 60
    try:
        listener.connect(0, offers, 0.01)
    except ValueError as error:
        print(str(error).partition(" at ")[0])
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("hard", [300, 80])
def test_the_limit_of_open_files(hard: int) -> None:
    """It is raised if it must be, and as far as needed; no rank waits where it may not."""
    done = subprocess.run(
        [sys.executable, "-c", FILES, "64", str(hard)],
        env={**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60 * patience(),
    )
    said, limits = done.stdout.splitlines()
    soft = int(limits.strip("()").partition(",")[0])
    if hard == 300:
        assert said.startswith("no connection from ranks 1, 2, 3") and 92 < soft < 120
        return
    assert soft == 64
    assert said.startswith("60 ranks need connections, and with them this process needs ")
    assert said.endswith(" open files, but may have 80: raise the limit (ulimit -n)")


def test_no_socket_is_left_open() -> None:
    """Also those of strangers, and those of ranks where not all could connect."""
    require_whole(connected(3))
    before = len(os.listdir("/proc/self/fd"))
    connected(3, timeout_s=0.3, missing=(2,))
    require_whole(connected(3))
    until = time.monotonic() + 5 * patience()
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) == before
    assert before < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
