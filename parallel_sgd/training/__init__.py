"""The learner, its checkpoints, and the session: trains, evaluates and writes a run folder."""

from .checkpoint.config import CheckpointConfig
from .checkpoint.files import CHECKPOINTS
from .checkpoint.latest import resume
from .checkpoint.loader import LoadedCheckpoint, load_checkpoint
from .checkpoint.saver import Checkpoints
from .learner import Learner
from .session.auto_tune import AutoLearningRate, AutoMinibatchSize
from .session.cross_validation import CrossValidation
from .session.objective import ModelObjective, Objective
from .session.options import NotFinitePolicy
from .session.run_folder import RunFolder, require_installed_matplotlib, require_matplotlib
from .session.session import TrainingSession
from .session.state import Progress
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
