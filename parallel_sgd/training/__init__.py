"""The learner, its checkpoints, and the session that trains, evaluates and writes a run folder."""

from .auto_adjust import AutoLearningRate, AutoMinibatchSize
from .checkpoint_config import CheckpointConfig
from .checkpoint_files import CHECKPOINTS
from .checkpoints import Checkpoints
from .cross_validation import CrossValidation
from .learner import Learner
from .loading import LoadedCheckpoint, load_checkpoint
from .not_finite_policy import NotFinitePolicy
from .objective import ModelObjective, Objective
from .progress import Progress
from .resuming import resume
from .run_folder import (
    RunFolder,
    require_installed_matplotlib,
    require_matplotlib,
)
from .session import TrainingSession
from .trace_file import traced

__all__ = [
    "CHECKPOINTS",
    "AutoLearningRate",
    "AutoMinibatchSize",
    "CheckpointConfig",
    "Checkpoints",
    "CrossValidation",
    "Learner",
    "LoadedCheckpoint",
    "ModelObjective",
    "NotFinitePolicy",
    "Objective",
    "Progress",
    "RunFolder",
    "TrainingSession",
    "load_checkpoint",
    "require_installed_matplotlib",
    "require_matplotlib",
    "resume",
    "traced",
]
