"""How the ranks that are left go on as one group, after some have died, and with those in reserve.

Every rank has a place, from 0 on, which is its number in the group. A rank in reserve takes the
place of one that has died; without one, those behind it move up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Role(IntEnum):
    """What a rank of the world does."""

    TRAINS = 0
    STANDBY = 1
    FINISHED = 2  #: its program has come to its end; it waits for the others'


@dataclass(frozen=True)
class Member:
    """A rank that is left.

    Attributes:
        rank: in the world, for good.
        role: of it.
        place: in the group before; -1 where it was not in it.
        grows: whether it can share what it knows with ranks that join now.
    """

    rank: int
    role: Role
    place: int
    allow_join: bool


@dataclass(frozen=True)
class Membership:
    """The group as it goes on.

    Attributes:
        ranks: of the world, in the order of their new places.
        before: their places before; -1 for those that join.
        spares: how many ranks in reserve are left.
    """

    ranks: tuple[int, ...]
    before: tuple[int, ...]
    spares: int

    @property
    def joined(self) -> tuple[int, ...]:
        """New places of those that join."""
        return tuple(new for new, old in enumerate(self.before) if old < 0)


def new_membership(members: Sequence[Member], wanted: int) -> Membership:
    """The group that these ranks make. Local; the same on all of them.

    Args:
        members: all ranks of the world that are left.
        wanted: ranks of a whole group.
    """
    stay = sorted(
        (member for member in members if member.role == Role.TRAINS), key=lambda m: m.place
    )
    standby = sorted(m.rank for m in members if m.role == Role.STANDBY)
    places = {member.place: member for member in stay}
    free = [place for place in range(wanted) if place not in places]
    allow_join = bool(stay) and all(member.allow_join for member in stay)
    joining = dict(zip(free, standby if allow_join else [], strict=False))
    order = sorted([*places, *joining])
    return Membership(
        ranks=tuple(places[p].rank if p in places else joining[p] for p in order),
        before=tuple(p if p in places else -1 for p in order),
        spares=len(standby) - len(joining),
    )
