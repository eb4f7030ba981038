"""The links: their addresses, their limits, and the commands that make hosts on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import UserError

BURST = 256 << 10  #: bytes that a link takes at once after a rest, at the speed of memory

FRAME, PAYLOAD = 1514, 1448  #: bytes of a full Ethernet frame as `tc` counts it, and TCP's of it

SLOWEST, FASTEST = 1e6, 1e12  #: bits a second: 1mbit, 1000gbit

_TCP = "/proc/sys/net/ipv4/tcp_"
_SETTINGS = (
    # How often TCP sends again before it gives a host up: after 13 s, where Linux as it comes takes
    # a quarter of an hour, for which mpiexec would wait for a host that is cut off.
    f"echo 5 > {_TCP}retries2",
    # What finds out how fast to send: as Linux comes, whatever this machine has set, for figures
    # that can be compared. With BBR exchanges take up to 1.2 times as long (docs/experiments.md).
    # Where a namespace may not have cubic it takes reno, which may be had everywhere.
    "for name in cubic reno; do "
    f"if echo $name > {_TCP}congestion_control; then exit; fi; done 2>/dev/null",
)


def require_rate(rate: float) -> None:
    """Raise a UserError where links cannot have this rate."""
    if not (SLOWEST <= rate <= FASTEST or rate == math.inf):
        raise UserError(
            f"rate={rate:g} bit/s of emulated links must be 1mbit to 1000gbit, or unlimited"
        )


def payload_rate(rate: float) -> float:
    """Bytes a second of TCP's payload that a link of so many bits a second carries."""
    return rate / 8 * PAYLOAD / FRAME


def address(number: int) -> str:
    """Of a host, from 1, or the switch, 0; also where others have it: nothing gets out."""
    return f"10.77.0.{number + 1}"


def port(host: int) -> str:
    """The end of a host's link at the switch; hosts count from 0."""
    return f"port{host + 1}"


def commands(switch: str, names: Sequence[str], rate: float) -> list[list[str]]:
    """What makes the namespaces, the bridge and the links: commands without a shell."""
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
