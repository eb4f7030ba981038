"""`parallel-sgd run --gpus-per-rank N`: which of a host's GPUs are a rank's."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from ..communication.job_environment import srun_step
from ..errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"

_NONE = ("", "-1", "NoDevFiles")  #: in it: here the list ends, as CUDA and Slurm read it

#: srun has given each task GPUs of its own where one of these is set; else all of a host's tasks
#: see the same.
_SLURM_GAVE_EACH_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")


def visible_gpus(per_rank: int, local_rank: int, environ: Mapping[str, str]) -> str:
    """What CUDA_VISIBLE_DEVICES is to be for a rank: so many of the host's GPUs, in their order.

    Of those that the environment leaves visible, or else of all that are there.

    Args:
        per_rank: at least 1.
        local_rank: the rank's number among those of its host.

    Raises:
        UserError: this host has too few, as far as that can be known.

    Local. Does not start CUDA.
    """
    listed, first = environ.get(VISIBLE), local_rank * per_rank
    if srun_step(environ) is not None and any(map(environ.get, _SLURM_GAVE_EACH_TASK)):
        first = 0
    if listed is None:
        there, names = present(), [str(number) for number in range(first + per_rank)]
        said = f"it has {there}"
    else:
        words = (word.strip() for word in listed.split(","))
        names = list(takewhile(lambda word: word not in _NONE, words))
        there, said = len(names), f"{VISIBLE}={listed!r} leaves it {len(names)}"
    if there is not None and there < first + per_rank:
        raise UserError(
            f"gpus_per_rank={per_rank} takes {first + per_rank} GPUs on host "
            f"{socket.gethostname()}, up to its rank {local_rank}, and {said}"
        )
    return ",".join(names[first : first + per_rank])


def present(devices: Path = Path("/dev")) -> int | None:
    """How many GPUs of NVIDIA's this host has; None where its devices do not tell it. Local."""
    names = [path.name for path in devices.glob("*")]
    count = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in names)
    if count == 0 and {"dxg", "nvmap"} & set(names):  # Windows' subsystem for Linux; Jetson
        return None
    return count
