"""Small messages of plain values between ranks of MPI, beside all else that they do. Local."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

Sent = tuple["MPI.Request", bytes]
"""A message under way, with what it is sent from."""


def post(comm: MPI.Intracomm, item: Any, rank: int, tag: int) -> Sent:
    """Begin to send a value (see `objects`)."""
    from ..serialization import (
        packed,  # here, since it imports NumPy, which a launcher does not need
    )

    data = packed(item)
    return comm.Isend(data, rank, tag), data


def received(comm: MPI.Intracomm, tag: int) -> list[Any]:
    """The values that have come with a tag."""
    from mpi4py import MPI

    from ..serialization import unpacked

    items, status = [], MPI.Status()
    while (message := comm.Improbe(tag=tag, status=status)) is not None:
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv(data)
        items.append(unpacked(data))
    return items
