"""Small messages of plain values between MPI ranks, independent of all else. Local."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

Sent = tuple["MPI.Request", bytes]
"""A pending send and its buffer."""


def post(comm: MPI.Intracomm, item: Any, rank: int, tag: int) -> Sent:
    """Begin to send a value (see `serialization`)."""
    from ..serialization import (
        packed,  # imported here: a launcher does not need NumPy
    )

    data = packed(item)
    return comm.Isend(data, rank, tag), data


def received(comm: MPI.Intracomm, tag: int) -> list[Any]:
    """Return the values received with a tag so far."""
    from mpi4py import MPI

    from ..serialization import unpacked

    items, status = [], MPI.Status()
    while (message := comm.Improbe(tag=tag, status=status)) is not None:
        data = bytearray(status.Get_count(MPI.BYTE))
        # bounded: it is here, and short: it came whole
        message.Recv(data)
        items.append(unpacked(data))
    return items
