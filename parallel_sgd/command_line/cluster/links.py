"""The links of emulated hosts: their addresses and limits, and the commands that make them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import UserError

BURST = 256 << 10  #: bytes that an idle link accepts at once, at the speed of memory

FRAME, PAYLOAD = 1514, 1448  #: bytes of a full Ethernet frame as `tc` counts it, and TCP's of it

SLOWEST, FASTEST = 1e6, 1e12  #: bits a second: 1mbit, 1000gbit

_TCP = "/proc/sys/net/ipv4/tcp_"
_SETTINGS = (
    # The number of retries before TCP gives up: 13 s. With Linux's default, a quarter of an hour,
    # mpiexec would wait that long for a host without a link.
    f"echo 5 > {_TCP}retries2",
    # Congestion control: Linux's default, whatever this machine has set, for comparable figures.
    # With BBR exchanges take up to 1.2 times as long (docs/experiments.md). If a namespace may not
    # use cubic, take reno, which is always allowed.
    "for name in cubic reno; do "
    f"if echo $name > {_TCP}congestion_control; then exit; fi; done 2>/dev/null",
)


def require_rate(rate: float) -> None:
    """Raise a UserError if links cannot have this rate."""
    if not (SLOWEST <= rate <= FASTEST or rate == math.inf):
        raise UserError(
            f"rate={rate:g} bit/s of emulated links must be 1mbit to 1000gbit, or unlimited"
        )


def payload_rate(rate: float) -> float:
    """Return the bytes per second of TCP payload on a link of `rate` bits per second."""
    return rate / 8 * PAYLOAD / FRAME


def address(number: int) -> str:
    """Return the address of a host, counted from 1, or of the switch, 0.

    The addresses may be in use outside of the emulated network: no packet leaves it.
    """
    return f"10.77.0.{number + 1}"


def port(host: int) -> str:
    """Return the name of a host's port at the switch; hosts count from 0."""
    return f"port{host + 1}"


def commands(switch: str, names: Sequence[str], rate: float) -> list[list[str]]:
    """Return the commands that make the namespaces, the bridge and the links, without a shell."""
    limit = f"root tbf rate {rate / 1e3:.0f}kbit burst {BURST}b latency 50ms"
    lines = [
        f"ip netns add {switch}",
        f"ip -n {switch} link set lo up",
        f"ip -n {switch} link add br0 type bridge",
        f"ip -n {switch} addr add {address(0)}/24 dev br0",
        f"ip -n {switch} link set br0 up",
    ]
    for i, name in enumerate(names):
        lines += [
            f"ip netns add {name}",
            f"ip link add {port(i)} netns {switch} type veth peer name eth0 netns {name}",
            f"ip -n {switch} link set {port(i)} master br0 up",
            f"ip -n {name} addr add {address(i + 1)}/24 dev eth0",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set eth0 up",
        ]
        if rate < math.inf:
            lines += [
                f"tc -n {switch} qdisc add dev {port(i)} {limit}",
                f"tc -n {name} qdisc add dev eth0 {limit}",
            ]
    settings = [
        ["ip", "netns", "exec", name, "sh", "-c", setting]
        for name in (switch, *names)
        for setting in _SETTINGS
    ]
    return [line.split() for line in lines] + settings
