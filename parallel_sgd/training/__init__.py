"""The learner, and the session that trains, evaluates and writes a run folder."""

from .learner import Learner

__all__ = ["Learner"]
