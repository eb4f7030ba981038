"""Predicted training speed on a cluster: the cost of every algorithm, before any run."""

from .candidates import Blocks, Candidate, DataParallel, DoubleBuffered, Servers, candidates
from .job import Job, StepCost
from .recommendation import Recommendation, recommend, sensitivity, title

__all__ = [
    "Blocks",
    "Candidate",
    "DataParallel",
    "DoubleBuffered",
    "Job",
    "Recommendation",
    "Servers",
    "StepCost",
    "candidates",
    "recommend",
    "sensitivity",
    "title",
]
