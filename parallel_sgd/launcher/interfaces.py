"""`parallel-sgd run --interface IFACE`: the network to other hosts, for all that uses one."""

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
    """One of a host's, with its IPv4 address and network, such as 10.0.0.5/24."""

    name: str
    address: ipaddress.IPv4Interface
    loopback: bool = False


def interfaces() -> list[Interface]:
    """This host's that are up and have an IPv4 address. Local. Linux."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def ask(what: int, name: str) -> bytes:
            request = struct.pack("256s", name.encode()[:15])
            return fcntl.ioctl(any_socket.fileno(), what, request)

        for _, name in socket.if_nameindex():
            try:
                flags = struct.unpack("H", ask(_SIOCGIFFLAGS, name)[16:18])[0]
                address, mask = (
                    socket.inet_ntoa(ask(what, name)[20:24])
                    for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:  # it has no IPv4 address, or has just gone
                continue
            if flags & _UP:
                network = ipaddress.IPv4Interface(f"{address}/{mask}")
                found.append(Interface(name, network, bool(flags & _LOOPBACK)))
    return found


def checked_interface(text: str) -> str:
    """Return what names a network on every host: an interface's name, or a CIDR.

    Raises:
        UserError: it is neither, or more than one.
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


def on_this_host(interface: str, there: Sequence[Interface]) -> Interface:
    """The one of a host's interfaces that is meant.

    Args:
        interface: as `checked_interface` returns it.
        there: the host's.

    Raises:
        UserError: it has none such, or several.
    """
    if "/" in interface:
        network = ipaddress.IPv4Network(interface)
        fits = [one for one in there if one.address.ip in network]
    else:
        fits = [one for one in there if one.name == interface]
    if len(fits) != 1:
        has = ", ".join(f"{one.name} {one.address}" for one in fits or there) or "none"
        raise UserError(
            f"interface={interface!r} must name one interface of host {socket.gethostname()} that "
            f"is up, and names {len(fits)}: {has}"
        )
    return fits[0]


def variables(interface: Interface) -> dict[str, str]:
    """The environment by which MPI, gloo and NCCL take this interface, before they start."""
    name = interface.name
    return {
        "OMPI_MCA_btl_tcp_if_include": name,
        "FI_TCP_IFACE": name,
        "FI_SOCKETS_IFACE": name,
        "UCX_NET_DEVICES": name,
        "GLOO_SOCKET_IFNAME": name,
        "NCCL_SOCKET_IFNAME": f"={name}",
    }
