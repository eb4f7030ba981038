"""A cluster emulated on this machine: hosts with addresses and names, on limited links.

A host is a network namespace on a bridge. The ranks of a host have a UTS namespace with the host's
name (otherwise MPI would take all hosts for the same), and shared memory of their own. Both ends of
a host's link are limited (`tc tbf`), so the host sends and receives at the same rate, at the same
time. Cores and memory are those of this machine, and shared. The bridge and mpiexec are in a
further namespace: nothing outside of these namespaces is changed.

Needs root, `ip` and `tc` (Debian: iproute2), `unshare` (util-linux), and mpi4py with Open MPI 5 or
MPICH. `parallel-sgd cluster --help` runs any command on such a cluster. In Python::

    with emulated_hosts(4, 1e9) as hosts:
        subprocess.run([*hosts.inside, "mpiexec", ...], env=os.environ | hosts.environment)
"""

from .hosts import EmulatedHosts, emulated_hosts
from .links import BURST, payload_rate

__all__ = ["BURST", "EmulatedHosts", "emulated_hosts", "payload_rate"]
