"""NCCL's collectives over ranks with a GPU each.

Several ranks are tested only with a stand-in for CuPy and NCCL; one rank has run on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import SharedError, UserError
from ...kernels import array_module, on_device
from ..communicator import Communicator
from .staging import Array, is_done, recorded


class Nccl:
    """NCCL's collectives of some ranks, each with its own GPU.

    Args:
        comm: the ranks.
        like: an array on this rank's GPU: float32, float64 or uint8.
        own: `comm` is used only here, and is closed with this object.
    Raises:
        SharedError: NCCL cannot start on rank 0.

    Creation is collective, and takes NCCL up to some seconds. Each method is collective, too: it
    waits for earlier work on the current stream, and returns when NCCL is done. NCCL uses a
    separate stream, so that a background sum does not delay other GPU work. A wait longer than
    `timeout_s` ends the job, as does an NCCL error.
    """

    def __init__(self, comm: Communicator, like: Array, *, own: bool = False) -> None:
        self._xp, self.size = array_module(like), comm.size
        self._ranks = comm if own else None
        self._nccl = _module(self._xp)
        self._type = {
            np.dtype(np.float32): self._nccl.NCCL_FLOAT32,
            np.dtype(np.float64): self._nccl.NCCL_FLOAT64,
            np.dtype(np.uint8): self._nccl.NCCL_UINT8,
        }[like.dtype]
        self._messages = comm.messages()  # only bounds the waits, never sends
        made = comm.together(lambda: self._identity() if comm.rank == 0 else None)
        identity = comm.allgather_object(made)[0]
        with on_device(like):
            self._stream = self._xp.cuda.Stream(non_blocking=True)
            self._messages.enter()
            with self._messages.watched("the start of NCCL"):
                self._comm = self._nccl.NcclCommunicator(comm.size, identity, comm.rank)

    def close(self) -> None:
        """Free NCCL's resources on the GPU, and the ranks' communicator. Collective."""
        self._comm.destroy()
        if self._ranks is not None:
            self._ranks.close()

    def all_reduce(self, values: Array) -> None:
        """Replace `values` by their sum over the ranks."""
        place, add = values.data.ptr, self._nccl.NCCL_SUM
        self._begin()
        self._comm.allReduce(place, place, values.size, self._type, add, self._stream.ptr)
        self._finish("NCCL's all-reduce")

    def send_receive(
        self, sent: Sequence[tuple[int, Array]], received: Sequence[tuple[int, Array]]
    ) -> None:
        """Send an array to ranks, and receive an array from ranks.

        Args:
            sent: pairs of rank and array, of any type.
            received: pairs of rank and array, written.
        """
        kind, stream = self._nccl.NCCL_UINT8, self._stream.ptr
        self._begin()
        self._nccl.groupStart()
        for peer, values in received:
            # bounded: only queued on the stream
            self._comm.recv(values.data.ptr, values.nbytes, kind, peer, stream)
        for peer, values in sent:
            self._comm.send(values.data.ptr, values.nbytes, kind, peer, stream)
        self._nccl.groupEnd()
        self._finish("NCCL's messages")

    def broadcast_all(self, arrays: Sequence[tuple[Array, int]]) -> None:
        """Broadcast several arrays, each from its own root rank.

        Args:
            arrays: pairs of array and root, in the same order on all ranks.
        """
        self._begin()
        self._nccl.groupStart()
        for values, root in arrays:
            place = values.data.ptr
            self._comm.broadcast(place, place, values.size, self._type, root, self._stream.ptr)
        self._nccl.groupEnd()
        self._finish("NCCL's broadcast")

    def _identity(self) -> Any:
        try:
            return self._nccl.get_unique_id()
        except self._nccl.NcclError as error:
            raise UserError(f"transport='nccl' needs NCCL, which cannot start: {error}") from None

    def _begin(self) -> None:
        now = recorded(self._xp, self._xp.cuda.get_current_stream())
        self._stream.wait_event(now)

    def _finish(self, name: str) -> None:
        event, backoff = recorded(self._xp, self._stream), self._messages.backoff()
        self._messages.enter()
        with self._messages.watched(name):
            while not is_done(self._xp, event):
                try:
                    self._comm.check_async_error()
                except self._nccl.NcclError:
                    self._comm.abort()  # otherwise NCCL hangs at this process's exit
                    raise
                self._messages.progress()
                backoff.pause()


def require_gpus(like: Array, comm: Communicator) -> None:
    """Check on all ranks that NCCL can work with these arrays. Collective.

    Raises:
        SharedError: the arrays are NumPy's, CuPy finds no NCCL, or ranks share a GPU.
    """
    xp, problem = array_module(like), None
    if xp is np:
        problem = "transport='nccl' needs CuPy parameters, but these are NumPy's"
    elif not _module(xp).available:
        problem = (
            "transport='nccl' needs NCCL, which CuPy does not find: pip install nvidia-nccl-cu12, "
            "or nvidia-nccl-cu13, by your CUDA"
        )
    comm.raise_together(problem)
    gpus = comm.allgather_object(xp.cuda.runtime.deviceGetPCIBusId(like.device.id))
    users: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(zip(comm.hosts, gpus, strict=True)):
        users.setdefault(place, []).append(rank)
    for (host, gpu), ranks in users.items():
        if len(ranks) > 1:
            used = len({bus for name, bus in users if name == host})
            raise SharedError(
                "transport='nccl' needs a GPU for each rank, but on "
                f"{host} {comm.hosts.count(host)} ranks have {used}: ranks "
                f"{', '.join(map(str, ranks))} share {gpu}"
            )


def _module(xp: Any) -> Any:
    """Import `cupy.cuda.nccl`, not loaded by `import cupy`."""
    return importlib.import_module(f"{xp.__name__}.cuda.nccl")
