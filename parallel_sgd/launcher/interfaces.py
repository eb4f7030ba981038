"""Choose the network interface to other hosts: `parallel-sgd run --interface IFACE`."""

from __future__ import annotations

import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import UserError

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


def checked_interface(text: str) -> str:
    """Return a name of a network for every host: an interface's name, or a CIDR.

    Raises:
        UserError: the text is neither, or names several.
    """
    if "/" in text:
        try:
            return str(ipaddress.IPv4Network(text, strict=False))
        except ValueError:
            pass
    elif re.fullmatch(r"[A-Za-z0-9_.:@-]{1,15}", text):
        return text
    raise UserError(
        f"interface={text!r} must be one interface's name or one IPv4 network: eth0, 10.0.0.0/24"
    )


def local_interface(interface: str, candidates: Sequence[Interface]) -> Interface:
    """Return the only interface of a host with this name or in this network.

    Args:
        interface: a name or CIDR, from `checked_interface`.
        candidates: the interfaces of the host.

    Raises:
        UserError: no interface matches, or several do.
    """
    if "/" in interface:
        network = ipaddress.IPv4Network(interface)
        matches = [candidate for candidate in candidates if candidate.address.ip in network]
    else:
        matches = [candidate for candidate in candidates if candidate.name == interface]
    if len(matches) != 1:
        has = (
            ", ".join(
                f"{candidate.name} {candidate.address}" for candidate in matches or candidates
            )
            or "none"
        )
        raise UserError(
            f"interface={interface!r} must name one interface of host {socket.gethostname()} that "
            f"is up, and names {len(matches)}: {has}"
        )
    return matches[0]


def interface_variables(interface: Interface) -> dict[str, str]:
    """Return the variables that make MPI, gloo and NCCL use this interface.

    Set before these start.
    """
    name = interface.name
    return {
        "OMPI_MCA_btl_tcp_if_include": name,
        "FI_TCP_IFACE": name,
        "FI_SOCKETS_IFACE": name,
        "UCX_NET_DEVICES": name,
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": f"={name}",
    }
