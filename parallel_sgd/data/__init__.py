"""Data sets, and sources that deal their samples out to the ranks in minibatches.

>>> train, test = digits(seed=0)
>>> source = Source(train, minibatch_size=64, epochs=20, seed=0)
>>> source.samples_per_epoch
1437
"""

from .ahead import with_next
from .bundled import DIGITS_CLASSES, digits
from .classes import count_classes
from .clicks import CLICKS_CLASSES, Clicks, clicks
from .dataset import Arrays, Dataset, Flattened, Items, Subset, as_dataset, flattened
from .files import load
from .fingerprint import fingerprint, require_same_data
from .library_source import ByteWindows, library_source
from .ngrams import NGRAM_CLASSES, ORDERS, NGrams, library_ngrams
from .rank_source import RankSource
from .source import Source
from .view import CommunicatorView, FeedView, LearnerView

__all__ = [
    "CLICKS_CLASSES",
    "DIGITS_CLASSES",
    "NGRAM_CLASSES",
    "ORDERS",
    "Arrays",
    "ByteWindows",
    "Clicks",
    "CommunicatorView",
    "Dataset",
    "FeedView",
    "Flattened",
    "Items",
    "LearnerView",
    "NGrams",
    "RankSource",
    "Source",
    "Subset",
    "as_dataset",
    "clicks",
    "count_classes",
    "digits",
    "fingerprint",
    "flattened",
    "library_ngrams",
    "library_source",
    "load",
    "require_same_data",
    "with_next",
]
