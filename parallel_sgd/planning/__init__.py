"""Predicted training speed on a cluster: the cost of every algorithm, before any run."""

from .candidates import (
    Blocks,
    Candidate,
    DataParallel,
    DoubleBuffered,
    Servers,
    candidate_of,
    candidates,
    learn_alike,
)
from .curve import Reached, reached
from .job import Job, StepCost
from .recommendation import Recommendation, recommend, sensitivity, title

__all__ = [
    "Blocks",
    "Candidate",
    "DataParallel",
    "DoubleBuffered",
    "Job",
    "Reached",
    "Recommendation",
    "Servers",
    "StepCost",
    "candidate_of",
    "candidates",
    "learn_alike",
    "reached",
    "recommend",
    "sensitivity",
    "title",
]
