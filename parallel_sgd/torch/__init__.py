"""Training of PyTorch models on MPI ranks: every algorithm, for your own model and loop."""

from ..lazy import on_first_use
from . import plain_tensors  # noqa: F401  (checkpoints can hold tensors)
from .ddp.compress import compress
from .ddp.gathered_state import GatheredState
from .ddp.hook import hook, hook_state
from .ddp.state import HookState
from .learner import Learner
from .objective import Objective
from .process_group import init_process_group
from .sampler import MinibatchSampler
from .sampler import MinibatchSampler as sampler
from .sharded_model import ShardedModel

__all__ = [
    "GatheredState",
    "HookState",
    "Learner",
    "MinibatchSampler",
    "Objective",
    "ShardedModel",
    "compress",
    "hook",
    "hook_state",
    "init_process_group",
    "sampler",
]

# The trainers of other packages, imported by those who use them.
__getattr__, _ = on_first_use(
    __name__,
    {"trainers.huggingface": ["TrainerCallback"], "trainers.lightning": ["LightningStrategy"]},
)
