"""What training on so many nodes should take: every algorithm priced, before anybody runs one."""

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
