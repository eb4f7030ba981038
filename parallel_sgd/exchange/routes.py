"""Who sums for whom: ranks of one host first among themselves, then one message between hosts.

Every piece of the vector has an owner. On each host one rank gathers the piece: it adds what the
ranks of its host have, and sends one message to the owner, which adds what the hosts have and sends
the result back, to be passed on within each host. With every rank on a host of its own a rank
gathers its own values only, and all ranks talk to the owner.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Routes:
    """
    Attributes:
        hosts: the ranks of each host, ascending; hosts by their first rank.
        host_of: the number of each rank's host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]

    @classmethod
    def over(cls, hosts: Sequence[Hashable]) -> Routes:
        """From the host of every rank; equal for ranks of one host."""
        numbers: dict[Hashable, int] = {}
        host_of = tuple(numbers.setdefault(host, len(numbers)) for host in hosts)
        members = tuple(
            tuple(rank for rank, theirs in enumerate(host_of) if theirs == host)
            for host in range(len(numbers))
        )
        return cls(members, host_of)

    @classmethod
    def flat(cls, size: int) -> Routes:
        """Every rank sends to the owner itself."""
        return cls.over(range(size))

    @property
    def hierarchical(self) -> bool:
        """Whether any host has several ranks."""
        return len(self.hosts) < len(self.host_of)

    def gatherer(self, host: int, owner: int) -> int:
        """The rank that adds up a piece of this owner on a host: the owner itself, or on another
        host the one at its place, so that the ranks of a host share the work."""
        place = self.hosts[self.host_of[owner]].index(owner)
        return self.hosts[host][place % len(self.hosts[host])]


def routes_for(hosts: Sequence[str], hierarchical: bool | str) -> Routes:
    """
    Args:
        hosts: the machine of every rank.
        hierarchical: "auto" is yes where there are several hosts, and several ranks on one of
            them: on a single machine there is no message between hosts to save.
    """
    if hierarchical == "auto":
        hierarchical = 1 < len(set(hosts)) < len(hosts)
    return Routes.over(hosts) if hierarchical else Routes.flat(len(hosts))
