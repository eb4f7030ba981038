"""Small models on NumPy or CuPy, so that training needs no other library."""

from .classifier import Classifier
from .mlp import MLP, SoftmaxRegression

__all__ = ["MLP", "Classifier", "SoftmaxRegression"]
