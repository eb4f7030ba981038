"""Data sets, and sources that divide their samples among the ranks in minibatches.

>>> train, test = digits(seed=0)
>>> source = Source(train, minibatch_size=64, epochs=20, seed=0)
>>> source.samples_per_epoch
1437
"""

from .dataset import Arrays, Dataset, Flattened, Images, Subset, flattened
from .examples.bundled import DIGITS_CLASSES, FASHION_MNIST_CLASSES, digits, fashion_mnist
from .examples.byte_sequences import ByteSequences, library_sequences, text_sequences
from .examples.clicks import CLICKS_CLASSES, Clicks, clicks
from .examples.library_source import ByteWindows, library_source
from .examples.ngrams import NGRAM_CLASSES, ORDERS, NGrams, library_ngrams
from .fingerprint import fingerprint, require_same_data
from .formats import FORMATS, Format, ends, load, load_train_test
from .items import Items, as_dataset
from .joined import Joined
from .readers.cifar import CifarFile, cifar10, cifar100
from .readers.cntk_streams import Dense, Sparse
from .readers.cntk_text import CNTKSamples, CNTKSequences, load_cntk_sequences, load_cntk_text
from .readers.columns import Columns
from .readers.csv_table import CSVTable, csv_parts, load_csv
from .readers.files import load_idx_pair, load_npy, load_npz, npz_parts
from .readers.idx import load_idx
from .readers.image_folder import ImageFolder, image_folders
from .readers.libsvm import LibSVM, load_libsvm
from .readers.tables import arrow_parts, load_arrow, load_parquet, parquet_parts
from .sequences import Padded, SequenceArrays, Sequences, as_sequences, padded
from .sources.minibatches import BaseSource, MinibatchSource, with_next
from .sources.per_rank import RankSource
from .sources.sequences import SequenceSource
from .sources.shared import Source
from .sparse_rows import SparseRows
from .standardization import Standardization, Standardized, read_standardization
from .tasks import TASKS, Task, count_classes, task_of
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
