"""Make the communicator of ranks that find each other through PyTorch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from ...errors import UserError
from ...validation import kind_of, line_of
from ..job_environment import torch_ranks
from ..liveness.abort import install_excepthook
from ..liveness.heartbeat import own as own_heartbeat
from ..liveness.rank_process import claim_world, join_world
from ..liveness.watchdog import Watchdog
from ..phrases import in_words
from ..serialization import packed, unpacked
from .communicator import C10dCommunicator
from .connections import Listener, Offer
from .mesh import Mesh

Gather = Callable[[bytes], Sequence[bytes]]  #: returns the bytes of every rank, in rank order

_worlds = itertools.count()  #: worlds made so far, the same number on every rank


def of_process_group(group: Any, timeout_s: float) -> C10dCommunicator:
    """See `Communicator.of_process_group`."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "there is no process group of torch.distributed: call "
            "torch.distributed.init_process_group() first, or destroy the group later"
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UserError("this process is not in the process group")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UserError(
            f"group must be a process group of torch.distributed, or None: it is {kind_of(group)}"
        )
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
        place = dist.get_rank(group)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"the process group cannot be used: {line_of(error)}") from None

    join_world(dist.get_rank(), dist.get_world_size())
    name = "Communicator.of_process_group()"
    watched = Watchdog(timeout_s, ranks[place], _end_process)

    def gather(data: bytes) -> Sequence[bytes]:
        with watched(f"{name}, which every rank of the process group must call"):
            return _all_gather(data, len(ranks), group)

    return _made(name, gather, place, ranks, watched)


def _all_gather(data: bytes, ranks: int, group: Any) -> list[bytes]:
    """Return the bytes of every rank of a process group. Collective. Nothing is pickled."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    # bounded: in gather's watched
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.tensor([*data.ljust(longest, b"\0")], dtype=torch.uint8, device=device)
    rooms = [torch.empty_like(padded) for _ in range(ranks)]
    # bounded: in gather's watched
    dist.all_gather(rooms, padded, group=group)
    return [bytes(room.tolist()[: int(n)]) for room, n in zip(rooms, lengths, strict=True)]


def of_environment(timeout_s: float) -> C10dCommunicator:
    """Return all ranks of torchrun or a similar launcher: see `Communicator.world`. Collective."""
    import torch.distributed as dist

    found = torch_ranks()
    assert found is not None
    rank, size = found
    claim_world()
    join_world(rank, size)
    install_excepthook()
    if rank >= size:
        raise UserError(f"RANK={rank} must be below WORLD_SIZE={size}")
    name, limit = f"parallel_sgd/{next(_worlds)}", timedelta(seconds=timeout_s)

    def gather(data: bytes) -> Sequence[bytes]:
        store, *_ = next(iter(dist.rendezvous("env://", timeout=limit)))
        own = dist.PrefixStore(name, store)
        own.set(str(rank), data)
        keys = [str(peer) for peer in range(size)]
        try:
            own.wait(keys, limit)
        except RuntimeError:
            missing = [peer for peer, key in enumerate(keys) if not own.check([key])]
            raise UserError(f"no answer of {in_words(missing)} within {timeout_s:g} s") from None
        gathered = [own.get(key) for key in keys]
        # Rank 0 may hold the store: it stays until the last rank has read all.
        if own.add("read", 1) == size:
            own.add("all have read", 1)
        if rank == 0:
            own.wait(["all have read"], limit)
        return gathered

    watched = Watchdog(timeout_s, rank, _end_process)
    return _made("Communicator.world()", gather, rank, tuple(range(size)), watched)


def _made(
    name: str, gather: Gather, rank: int, world_ranks: tuple[int, ...], watched: Watchdog
) -> C10dCommunicator:
    """Connect the ranks. Collective.

    Args:
        name: of the calling function, for error texts.
        gather: collective over these ranks, in bounded time.
        rank: this rank.
        world_ranks: of all ranks, in order.
        watched: bounds every wait.
    """
    install_excepthook()
    with Listener() as listener:
        try:
            gathered = gather(packed([*listener.offer]))
        except (RuntimeError, ValueError, OSError) as error:  # DistError is a RuntimeError
            reason = line_of(error).partition(" Exception raised from")[0]
            raise UserError(
                f"{name}: a rank has ended, or the ranks cannot find each other: {reason}"
            ) from error
        offers = [Offer.of(unpacked(data)) for data in gathered]
        connections = listener.connect(rank, offers, watched.timeout_s)
    comm = C10dCommunicator(Mesh(rank, connections, world_ranks), watched)
    own_heartbeat.meet(
        world_ranks[rank],
        max(world_ranks) + 1,
        lambda token: comm.broadcast(np.frombuffer(token, np.uint8)),
        comm.barrier,
        watched.timeout_s,
    )
    return comm


def _end_process() -> None:
    """End this rank. The end of its connections ends the other ranks."""
    os._exit(1)
