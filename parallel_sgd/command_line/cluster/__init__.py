"""A cluster that this machine emulates: hosts with addresses and names, on limited links.

A host is a network namespace on a bridge. Its ranks have a UTS namespace with its name, or MPI
would take all hosts for one, and shared memory of their own. Both ends of its link are limited
(`tc tbf`), so that it sends and receives at the same rate, at once. Cores and memory are this
machine's, and shared. The bridge and mpiexec are in one more namespace: nothing outside of them is
touched.

Needs root, `ip` and `tc` (Debian: iproute2), `unshare` (util-linux), and mpi4py with Open MPI 5 or
MPICH. `parallel-sgd cluster --help` runs any command on such a cluster. In Python::

    with emulated_hosts(4, 1e9) as hosts:
        subprocess.run([*hosts.inside, "mpiexec", ...], env=os.environ | hosts.environment)
"""

from .hosts import EmulatedHosts, emulated_hosts
from .links import BURST, payload_rate

__all__ = ["BURST", "EmulatedHosts", "emulated_hosts", "payload_rate"]
