"""Predicted training speed on a cluster: the cost of every algorithm, before any run."""

from .candidates import Candidate, candidates
from .job import Job, StepCost
from .recommendation import Recommendation, recommend, sensitivity, title

__all__ = [
    "Candidate",
    "Job",
    "Recommendation",
    "StepCost",
    "candidates",
    "recommend",
    "sensitivity",
    "title",
]
