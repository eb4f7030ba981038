"""The learner, its checkpoints, and the session that trains, evaluates and writes a run folder."""

from .checkpoints import Checkpoints
from .learner import Learner
from .loading import LoadedCheckpoint, load_checkpoint
from .progress import Progress
from .run_folder import CHECKPOINTS, RunFolder, require_matplotlib
from .session import Session
from .trace_file import traced

__all__ = [
    "CHECKPOINTS",
    "Checkpoints",
    "Learner",
    "LoadedCheckpoint",
    "Progress",
    "RunFolder",
    "Session",
    "load_checkpoint",
    "require_matplotlib",
    "traced",
]
