"""Small models on NumPy or CuPy: training without another library."""

from .embedded import EmbeddedMLP, Rows
from .language import ByteLanguageModel
from .losses import LOSSES, TASK_LOSSES, BinaryCrossEntropy, CrossEntropy, Loss, SquaredError
from .mlp import MLP, SoftmaxRegression, use_gpu
from .model import Model

Classifier = Model  #: former name, still exported

__all__ = [
    "LOSSES",
    "MLP",
    "TASK_LOSSES",
    "BinaryCrossEntropy",
    "ByteLanguageModel",
    "Classifier",
    "CrossEntropy",
    "EmbeddedMLP",
    "Loss",
    "Model",
    "Rows",
    "SoftmaxRegression",
    "SquaredError",
    "use_gpu",
]
