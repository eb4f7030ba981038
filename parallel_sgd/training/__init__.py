"""The learner, and the session that trains, evaluates and writes a run folder."""

from .learner import Learner
from .run_folder import RunFolder, require_matplotlib
from .session import Progress, Session

__all__ = ["Learner", "Progress", "RunFolder", "Session", "require_matplotlib"]
