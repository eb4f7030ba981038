"""The commands `train`, `predict`, `simulate`, `plan`, `info`, `doctor` and `cluster`.

A command imports only what that command needs.
"""

from typing import TYPE_CHECKING

from ..lazy import on_first_use

if TYPE_CHECKING:
    from .cluster import BURST, EmulatedHosts, emulated_hosts, payload_rate
    from .train.arguments import described_as_config, read
    from .train.command import train_on
    from .train.config import arguments_of
    from .train.data import TrainingData, read_data
    from .train.model import make_model
    from .train.options import parser
    from .train.reporting import print_choices

__all__ = [
    "BURST",
    "EmulatedHosts",
    "TrainingData",
    "arguments_of",
    "described_as_config",
    "emulated_hosts",
    "make_model",
    "parser",
    "payload_rate",
    "print_choices",
    "read",
    "read_data",
    "train_on",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "cluster": ("BURST", "EmulatedHosts", "emulated_hosts", "payload_rate"),
        "train.arguments": ("described_as_config", "read"),
        "train.command": ("train_on",),
        "train.config": ("arguments_of",),
        "train.data": ("TrainingData", "read_data"),
        "train.model": ("make_model",),
        "train.options": ("parser",),
        "train.reporting": ("print_choices",),
    },
)
