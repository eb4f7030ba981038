"""Data sets, and sources that deal their samples out to the ranks in minibatches.

>>> train, test = digits(seed=0)
>>> source = Source(train, minibatch_size=64, epochs=20, seed=0)
>>> source.samples_per_epoch
1437
"""

from .ahead import with_next
from .bundled import DIGITS_CLASSES, FASHION_MNIST_CLASSES, digits, fashion_mnist
from .byte_sequences import ByteSequences, library_sequences, text_sequences
from .cifar import CifarFile, cifar10, cifar100
from .classes import count_classes
from .clicks import CLICKS_CLASSES, Clicks, clicks
from .cntk_streams import Dense, Sparse
from .cntk_text import CNTKSamples, CNTKSequences, load_cntk_sequences, load_cntk_text
from .columns import Columns
from .csv_table import CSVTable, csv_parts, load_csv
from .dataset import Arrays, Dataset, Flattened, Subset, flattened
from .files import load_idx_pair, load_npy, load_npz, npz_parts
from .fingerprint import fingerprint, require_same_data
from .formats import FORMATS, Format, ends, load, load_train_test
from .idx import load_idx
from .image_folder import ImageFolder, image_folders
from .images import Images
from .items import Items, as_dataset
from .joined import Joined
from .library_source import ByteWindows, library_source
from .libsvm import LibSVM, load_libsvm
from .minibatches import BaseSource, MinibatchSource
from .ngrams import NGRAM_CLASSES, ORDERS, NGrams, library_ngrams
from .rank_source import RankSource
from .sequence_source import SequenceSource
from .sequences import Padded, SequenceArrays, Sequences, as_sequences, padded
from .source import Source
from .sparse_rows import SparseRows
from .standardization import Standardization, Standardized, read_standardization
from .tables import arrow_parts, load_arrow, load_parquet, parquet_parts
from .tasks import TASKS, Task, task_of
from .view import CommunicatorView, FeedView, LearnerView

__all__ = [
    "CLICKS_CLASSES",
    "DIGITS_CLASSES",
    "FASHION_MNIST_CLASSES",
    "FORMATS",
    "NGRAM_CLASSES",
    "ORDERS",
    "TASKS",
    "Arrays",
    "BaseSource",
    "ByteSequences",
    "ByteWindows",
    "CNTKSamples",
    "CNTKSequences",
    "CSVTable",
    "CifarFile",
    "Clicks",
    "Columns",
    "CommunicatorView",
    "Dataset",
    "Dense",
    "FeedView",
    "Flattened",
    "Format",
    "ImageFolder",
    "Images",
    "Items",
    "Joined",
    "LearnerView",
    "LibSVM",
    "MinibatchSource",
    "NGrams",
    "Padded",
    "RankSource",
    "SequenceArrays",
    "SequenceSource",
    "Sequences",
    "Source",
    "Sparse",
    "SparseRows",
    "Standardization",
    "Standardized",
    "Subset",
    "Task",
    "arrow_parts",
    "as_dataset",
    "as_sequences",
    "cifar10",
    "cifar100",
    "clicks",
    "count_classes",
    "csv_parts",
    "digits",
    "ends",
    "fashion_mnist",
    "fingerprint",
    "flattened",
    "image_folders",
    "library_ngrams",
    "library_sequences",
    "library_source",
    "load",
    "load_arrow",
    "load_cntk_sequences",
    "load_cntk_text",
    "load_csv",
    "load_idx",
    "load_idx_pair",
    "load_libsvm",
    "load_npy",
    "load_npz",
    "load_parquet",
    "load_train_test",
    "npz_parts",
    "padded",
    "parquet_parts",
    "read_standardization",
    "require_same_data",
    "task_of",
    "text_sequences",
    "with_next",
]
