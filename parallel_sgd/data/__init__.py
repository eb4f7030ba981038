"""Data sets, and sources that deal their samples out to the ranks in minibatches.

>>> train, test = digits(seed=0)
>>> source = Source(train, minibatch_size=64, epochs=20, seed=0)
>>> source.samples_per_epoch
1437
"""

from .ahead import with_next
from .bundled import DIGITS_CLASSES, FASHION_MNIST_CLASSES, digits, fashion_mnist
from .byte_sequences import ByteSequences, library_sequences, text_sequences
from .classes import count_classes
from .clicks import CLICKS_CLASSES, Clicks, clicks
from .dataset import Arrays, Dataset, Flattened, Items, Subset, as_dataset, flattened
from .files import load
from .fingerprint import fingerprint, require_same_data
from .idx import load_idx
from .images import Images
from .library_source import ByteWindows, library_source
from .ngrams import NGRAM_CLASSES, ORDERS, NGrams, library_ngrams
from .rank_source import RankSource
from .source import Source
from .view import CommunicatorView, FeedView, LearnerView

__all__ = [
    "CLICKS_CLASSES",
    "DIGITS_CLASSES",
    "FASHION_MNIST_CLASSES",
    "NGRAM_CLASSES",
    "ORDERS",
    "Arrays",
    "ByteSequences",
    "ByteWindows",
    "Clicks",
    "CommunicatorView",
    "Dataset",
    "FeedView",
    "Flattened",
    "Images",
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
    "fashion_mnist",
    "fingerprint",
    "flattened",
    "library_ngrams",
    "library_sequences",
    "library_source",
    "load",
    "load_idx",
    "require_same_data",
    "text_sequences",
    "with_next",
]
