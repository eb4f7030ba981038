"""Data sets, and sources that deal their samples out to the ranks in minibatches.

>>> train, test = digits(seed=0)
>>> source = Source(train, minibatch_size=64, epochs=20, seed=0)
>>> source.samples_per_epoch
1437
"""

from .bundled import DIGITS_CLASSES, digits
from .classes import count_classes
from .dataset import Arrays, Dataset, Flattened, Items, Subset, as_dataset, flattened
from .files import load
from .library_source import ByteWindows, library_source
from .rank_source import RankSource
from .source import Source
from .view import CommunicatorView, LearnerView

__all__ = [
    "DIGITS_CLASSES",
    "Arrays",
    "ByteWindows",
    "CommunicatorView",
    "Dataset",
    "Flattened",
    "Items",
    "LearnerView",
    "RankSource",
    "Source",
    "Subset",
    "as_dataset",
    "count_classes",
    "digits",
    "flattened",
    "library_source",
    "load",
]
