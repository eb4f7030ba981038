"""Assign a host's GPUs to its ranks: `parallel-sgd run --gpus-per-rank N`."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from ..communication.job_environment import srun_step
from ..errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"

_LIST_END = ("", "-1", "NoDevFiles")  #: entries that end the list for CUDA and Slurm

#: If one of these is set, srun has given each task its own GPUs. Otherwise all tasks of a host see
#: the same GPUs.
_SLURM_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")


def visible_gpus(per_rank: int, local_rank: int, environ: Mapping[str, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a rank: its share of the host's GPUs, in their order.

    The share is taken from the GPUs left visible by the environment, or else from all GPUs present.

    Args:
        per_rank: the number of GPUs of each rank, at least 1.
        local_rank: the rank's number on its host.
        environ: the rank's environment.

    Raises:
        UserError: this host has too few GPUs, as far as known.

    Local. Does not start CUDA.
    """
    listed, first = environ.get(VISIBLE), local_rank * per_rank
    if srun_step(environ) is not None and any(map(environ.get, _SLURM_PER_TASK)):
        first = 0
    if listed is None:
        count, names = gpu_count(), [str(number) for number in range(first + per_rank)]
        available = f"it has {count}"
    else:
        words = (word.strip() for word in listed.split(","))
        names = list(takewhile(lambda word: word not in _LIST_END, words))
        count, available = len(names), f"{VISIBLE}={listed!r} leaves it {len(names)}"
    if count is not None and count < first + per_rank:
        raise UserError(
            f"gpus_per_rank={per_rank} takes {first + per_rank} GPUs on host "
            f"{socket.gethostname()}, up to its rank {local_rank}, and {available}"
        )
    return ",".join(names[first : first + per_rank])


def gpu_count(devices: Path = Path("/dev")) -> int | None:
    """Return the number of NVIDIA GPUs of this host, or None if /dev does not show them. Local."""
    names = [path.name for path in devices.glob("*")]
    count = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in names)
    if count == 0 and {"dxg", "nvmap"} & set(names):  # Windows' subsystem for Linux; Jetson
        return None
    return count
