"""The learner, its checkpoints, and the session: trains, evaluates and writes a run folder."""

from .checkpoint.config import CheckpointConfig
from .checkpoint.files import CHECKPOINTS, MANIFEST, checkpoints_in
from .checkpoint.folder_lock import LOCK, FolderLock
from .checkpoint.latest import resume
from .checkpoint.loader import LoadedCheckpoint, load_checkpoint
from .checkpoint.saver import Checkpoints
from .feed import Feed
from .learner import Learner
from .recovery.base import NoRecovery
from .recovery.snapshot import SharedSnapshot, Snapshot
from .session.auto_tune import AutoLearningRate, AutoMinibatchSize
from .session.cross_validation import CrossValidation
from .session.initial_model import read_model, set_parameters
from .session.objective import ModelObjective, Objective
from .session.options import NotFinitePolicy
from .session.run_folder import RunFolder, require_installed_matplotlib, require_matplotlib
from .session.session import TrainingSession
from .session.state import Progress
from .session.tracker import Tracker
from .state.state_tree import capture, flatten, restore, restore_state, unflatten
from .trace_file import traced

__all__ = [
    "CHECKPOINTS",
    "LOCK",
    "MANIFEST",
    "AutoLearningRate",
    "AutoMinibatchSize",
    "CheckpointConfig",
    "Checkpoints",
    "CrossValidation",
    "Feed",
    "FolderLock",
    "Learner",
    "LoadedCheckpoint",
    "ModelObjective",
    "NoRecovery",
    "NotFinitePolicy",
    "Objective",
    "Progress",
    "RunFolder",
    "SharedSnapshot",
    "Snapshot",
    "Tracker",
    "TrainingSession",
    "capture",
    "checkpoints_in",
    "flatten",
    "load_checkpoint",
    "read_model",
    "require_installed_matplotlib",
    "require_matplotlib",
    "restore",
    "restore_state",
    "resume",
    "set_parameters",
    "traced",
    "unflatten",
]
