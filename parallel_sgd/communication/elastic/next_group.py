"""Form the next group from the remaining ranks after failures, with standby ranks.

Every rank has a place, from 0 on: its number in the group. A standby rank takes the place of a
failed rank. Without a standby rank, the ranks behind the gap move up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Role(IntEnum):
    """Role of a rank of the world."""

    TRAINS = 0
    STANDBY = 1
    FINISHED = 2  #: its program has finished; it waits for all training ranks to finish


@dataclass(frozen=True)
class Member:
    """A remaining rank.

    Attributes:
        rank: world rank, never changes.
        role: its role.
        place: place in the previous group; -1 outside the group.
        allow_join: the rank can share its state with joining ranks now.
    """

    rank: int
    role: Role
    place: int
    allow_join: bool


@dataclass(frozen=True)
class Membership:
    """The next group.

    Attributes:
        ranks: world ranks, in order of their new places.
        before: their previous places; -1 for joining ranks.
        spares: number of standby ranks left.
    """

    ranks: tuple[int, ...]
    before: tuple[int, ...]
    spares: int

    @property
    def joined(self) -> tuple[int, ...]:
        """New places of the joining ranks."""
        return tuple(new for new, old in enumerate(self.before) if old < 0)


def new_membership(members: Sequence[Member], wanted: int) -> Membership:
    """Return the group formed by these ranks. Local, with the same result on all ranks.

    Args:
        members: all remaining ranks of the world.
        wanted: number of ranks in a complete group.
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
