"""The most memory of a rank, for every contender in new processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parallel_sgd import Communicator

from .contenders import CONTENDERS
from .step_times import LR, WARM_UP
from .tasks import SMALL
from .turns import playing


@dataclass(frozen=True)
class Memory:
    """
    Attributes:
        model, contender: of the measurement.
        before_bytes: before the model was made, but after training a small model by the same
            contender: Python, PyTorch, MPI, gloo, and the kernels.
        peak_bytes: the maximum during some steps. Both of the rank with the most.
    """

    model: str
    contender: str
    before_bytes: int
    peak_bytes: int

    @property
    def added_bytes(self) -> int:
        """Memory of the model, its training and its exchange."""
        return self.peak_bytes - self.before_bytes


def measure(comm: Communicator, model: str, name: str) -> dict[str, object]:
    """Return the fields of a `Memory`; PyTorch's models are trained."""
    count = max(2 * WARM_UP, CONTENDERS[name].period)
    with playing(comm, [name], modules=True) as ranks:
        with ranks.training(name, SMALL, LR) as turn:
            turn.steps(count)
        before = memory_bytes("VmRSS")
        with ranks.training(name, model, LR) as turn:
            turn.steps(count)
            peak = memory_bytes("VmHWM")
    most = map(max, zip(*comm.allgather_object((before, peak)), strict=True))
    return vars(Memory(model, name, *most))


def memory_bytes(name: str) -> int:
    """Return the memory of this process: "VmRSS" now, or "VmHWM" at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(size) << 10  # from KiB
