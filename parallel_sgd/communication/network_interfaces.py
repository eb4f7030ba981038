"""Network interfaces of this host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import NamedTuple

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B  # Linux
_UP, _LOOPBACK = 0x1, 0x8


class Interface(NamedTuple):
    """A network interface of a host, with its IPv4 address and network, such as 10.0.0.5/24."""

    name: str
    address: ipaddress.IPv4Interface
    loopback: bool = False


def interfaces() -> list[Interface]:
    """Return this host's interfaces in use with an IPv4 address. Local. Linux."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as socket_:

        def ioctl(request_code: int, name: str) -> bytes:
            request = struct.pack("256s", name.encode()[:15])
            return fcntl.ioctl(socket_.fileno(), request_code, request)

        for _, name in socket.if_nameindex():
            try:
                flags = struct.unpack("H", ioctl(_SIOCGIFFLAGS, name)[16:18])[0]
                address, mask = (
                    socket.inet_ntoa(ioctl(request_code, name)[20:24])
                    for request_code in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:  # no IPv4 address, or removed meanwhile
                continue
            if flags & _UP:
                network = ipaddress.IPv4Interface(f"{address}/{mask}")
                found.append(Interface(name, network, bool(flags & _LOOPBACK)))
    return found
