"""Small models on NumPy or CuPy, so that training needs no other library."""

from .classifier import Classifier
from .language import ByteLanguageModel
from .mlp import MLP, SoftmaxRegression, use_gpu

__all__ = ["MLP", "ByteLanguageModel", "Classifier", "SoftmaxRegression", "use_gpu"]
