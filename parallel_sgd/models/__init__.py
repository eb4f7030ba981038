"""Small models on NumPy or CuPy, so that training needs no other library."""

from .classifier import Classifier
from .mlp import MLP, SoftmaxRegression, use_gpu

__all__ = ["MLP", "Classifier", "SoftmaxRegression", "use_gpu"]
