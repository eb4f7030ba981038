"""Share the resources of a host: its cores, GPUs, and network interfaces.

`parallel-sgd run --gpus-per-rank N --interface IFACE`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from ..communication.job_environment import srun_step
from ..communication.network_interfaces import Interface
from ..errors import UserError


def all_cores() -> int:
    """Return the number of cores (hardware threads) of this machine."""
    return os.cpu_count() or 1


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return all_cores()


VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")

_LIST_END = ("", "-1", "NoDevFiles")  #: entries that end the list for CUDA and Slurm

#: If one of these is set, srun has given each task its own GPUs. Otherwise all tasks of a host see
#: the same GPUs.
_SLURM_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")


def visible_gpus(
    per_rank: int, local_rank: int, environ: Mapping[str, str], devices: Path = DEVICES
) -> str:
    """Return CUDA_VISIBLE_DEVICES for a rank: its share of the host's GPUs, in their order.

    The share is taken from the GPUs left visible by the environment, or else from all GPUs present.

    Args:
        per_rank: the number of GPUs of each rank, at least 1.
        local_rank: the rank's number on its host.
        environ: the rank's environment.
        devices: the folder of this host's devices.

    Raises:
        UserError: this host has too few GPUs, as far as known.

    Local. Does not start CUDA.
    """
    listed, first = environ.get(VISIBLE), local_rank * per_rank
    if srun_step(environ) is not None and any(map(environ.get, _SLURM_PER_TASK)):
        first = 0
    if listed is None:
        count, names = gpu_count(devices), [str(number) for number in range(first + per_rank)]
        available = f"it has {count}"
    else:
        words = (word.strip() for word in listed.split(","))
        names = list(takewhile(lambda word: word not in _LIST_END, words))
        count, available = len(names), f"{VISIBLE}={listed!r} leaves it {len(names)}"
    if count is not None and count < first + per_rank:
        raise UserError(
            f"gpus_per_rank={per_rank} takes {first + per_rank} GPUs on host "
            f"{socket.gethostname()}, up to its rank {local_rank}, and {available}"
        )
    return ",".join(names[first : first + per_rank])


def gpu_count(devices: Path = DEVICES) -> int | None:
    """Return the number of NVIDIA GPUs of this host, or None if /dev does not show them. Local."""
    names = [path.name for path in devices.glob("*")]
    count = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in names)
    if count == 0 and {"dxg", "nvmap"} & set(names):  # Windows' subsystem for Linux; Jetson
        return None
    return count


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
