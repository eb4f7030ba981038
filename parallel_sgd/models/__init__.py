"""Small models on NumPy or CuPy, so that training needs no other library."""

from .classifier import Classifier
from .embedded import EmbeddedMLP, Rows
from .language import ByteLanguageModel
from .mlp import MLP, SoftmaxRegression, use_gpu

__all__ = [
    "MLP",
    "ByteLanguageModel",
    "Classifier",
    "EmbeddedMLP",
    "Rows",
    "SoftmaxRegression",
    "use_gpu",
]
