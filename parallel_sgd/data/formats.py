"""Formats of data files and folders: recognition by name or content, and their readers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..validation import checked_path, choice, shown
from .dataset import Dataset
from .examples.bundled import fashion_mnist, is_mnist
from .readers.cifar import (
    CIFAR10,
    CIFAR100,
    cifar10,
    cifar100,
    has_cifar_test,
    is_cifar,
    load_cifar10,
    load_cifar100,
)
from .readers.cntk_text import CNTKSamples, load_cntk_text
from .readers.csv_table import CSV, csv_parts, is_csv, load_csv
from .readers.files import find_npz_parts, load_idx_pair, load_npy, load_npz, npz_parts
from .readers.idx import is_idx
from .readers.image_folder import ImageFolder, find_image_parts, image_folders
from .readers.libsvm import load_libsvm
from .readers.parts import Parts, both_parts_problem, named
from .readers.tables import (
    ARROW,
    PARQUET,
    arrow_parts,
    is_table,
    load_arrow,
    load_parquet,
    parquet_parts,
    parts_in,
)

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Format:
    """The recognizer and the readers of one format.

    Keyword-only arguments of the readers are the options that `load` accepts and passes on.

    Attributes:
        matches: True if a path (existing or not) is taken for this format.
        load: reads a path as one data set; if `labels` is True, takes the path of the labels, too.
            None: the format always has a training and a test part.
        both: reads a path as (training, test).
        has_both: True if a path of this format contains a training and a test part.
        skipped: files and folders ignored by `both`: a validation part if there is a test part.
        labels: True if y is in a separate file.
    """

    matches: Callable[[Path], bool]
    load: Callable[..., Dataset] | None = None
    both: Callable[..., tuple[Dataset, Dataset]] | None = None
    has_both: Callable[[Path], bool] = lambda path: False
    skipped: Callable[[Path], Sequence[Path]] = lambda path: ()
    labels: bool = False


def ends(*suffixes: str) -> Callable[[Path], bool]:
    """Return a predicate for paths: True if the suffix is one of these, in any case."""
    return lambda path: path.suffix.lower() in suffixes


def _cntk(path: PathLike, *, streams: Any = None, comm: Any = None) -> CNTKSamples:
    """Call `load_cntk_text` with its required arguments as options."""
    return load_cntk_text(path, streams, comm=comm)


def _by_names(
    find: Callable[[Path], Parts | None],
) -> tuple[Callable[[Path], bool], Callable[[Path], Sequence[Path]]]:
    """Return `has_both` and `skipped` of a format whose parts have names, given their finder."""

    def skipped(path: Path) -> Sequence[Path]:
        parts = find(path)
        return parts.skipped if parts else ()

    return lambda path: find(path) is not None, skipped


def _table(
    load: Callable[..., Dataset],
    both: Callable[..., tuple[Dataset, Dataset]],
    suffixes: tuple[str, ...],
    matches: Callable[[Path], bool] | None = None,
) -> Format:
    """Return the format of files of columns, and of folders of such files."""
    matches = matches or partial(is_table, suffixes=suffixes)
    return Format(matches, load, both, *_by_names(partial(parts_in, suffixes=suffixes)))


#: Formats by name. The first match is taken.
FORMATS: dict[str, Format] = {
    "npz": Format(ends(".npz"), load_npz, npz_parts, _by_names(find_npz_parts)[0]),
    "npy": Format(ends(".npy"), load_npy, labels=True),
    "idx": Format(is_idx, load_idx_pair, labels=True),
    "parquet": _table(load_parquet, parquet_parts, PARQUET),
    "arrow": _table(load_arrow, arrow_parts, ARROW),
    "libsvm": Format(ends(".svm", ".libsvm", ".svmlight"), load_libsvm),
    "cntk": Format(ends(".ctf"), _cntk),
    "mnist": Format(is_mnist, None, fashion_mnist, Path.is_dir),
    "cifar10": Format(
        partial(is_cifar, CIFAR10), load_cifar10, cifar10, partial(has_cifar_test, CIFAR10)
    ),
    "cifar100": Format(
        partial(is_cifar, CIFAR100), load_cifar100, cifar100, partial(has_cifar_test, CIFAR100)
    ),
    "csv": _table(load_csv, csv_parts, CSV, is_csv),
    "images": Format(Path.is_dir, ImageFolder, image_folders, *_by_names(find_image_parts)),
}


def load(
    path: PathLike, labels: PathLike | None = None, *, format: str | None = None, **options: Any
) -> Dataset:
    """Open a data set; the samples are read as they are used, where the format allows.

    Args:
        path: of a file or folder. The format is recognized by the name, or by the content of the
            folder:

            - npz: a ``.npz`` file with arrays x and y (`load_npz`), or x_train, x_test and so on
              (`npz_parts`)
            - npy: a ``.npy`` file of x (`load_npy`)
            - idx: an IDX file of x, with "-idx" or ".idx" in its name (`load_idx_pair`)
            - parquet: a ``.parquet`` file, or a folder of Parquet files (`load_parquet`,
              `parquet_parts`)
            - arrow: an ``.arrow`` or ``.feather`` file, or a folder of such files (`load_arrow`,
              `arrow_parts`)
            - libsvm: a ``.svm``, ``.libsvm`` or ``.svmlight`` file (`load_libsvm`)
            - cntk: a ``.ctf`` file; requires ``streams=`` (`load_cntk_text`)
            - mnist: a folder with the files of MNIST or Fashion-MNIST (`fashion_mnist`)
            - cifar10, cifar100: a folder with the files of the binary version, or a single file
              (`cifar10`, `cifar100`)
            - csv: a ``.csv`` or ``.tsv`` file, also ``.gz``, or a folder of such files (`load_csv`,
              `csv_parts`)
            - images: a folder with a folder of images for each class (`ImageFolder`), or with such
              folders in ``train/`` and ``test/`` (`image_folders`)
        labels: path of y, if `path` is a ``.npy`` or IDX file of x; of the same format.
        format: one of these names, if the path does not tell.
        options: keyword arguments of the format's reader, such as ``size=(32, 32)`` for images.
    Returns:
        The data set.
    Raises:
        UserError: the format is not known; an option or `labels` does not belong to the format; the
            data are already split into training and test (use `load_train_test`); or a file is
            missing, malformed, truncated, not readable or no regular file (see the readers).

    Nothing in a file is ever executed. Local.
    """
    name, place = _format_of(path, format)
    if _has_both(name, place, options):
        raise UserError(both_parts_problem(place))
    return _load(name, path, labels, options)


def load_train_test(
    path: PathLike,
    labels: PathLike | None = None,
    *,
    format: str | None = None,
    test: int | float = 0.2,
    seed: int = 0,
    say: Callable[[str], object] | None = None,
    **options: Any,
) -> tuple[Dataset, Dataset]:
    """Open training and test data: the published parts if the data have them, else a random split.

    Args:
        path, labels, format, options: as for `load`.
        test, seed: as for `Dataset.split`. No effect if the data are already split, as CIFAR,
            MNIST, and folders with ``train/`` and ``test/`` are.
        say: called with one line: the data taken for training and for test. ``say=comm.print``
            prints this line on rank 0.
    Returns:
        (training, test).
    Raises:
        UserError: as for `load` or `Dataset.split`.

    Local.
    """
    name, place = _format_of(path, format)
    skipped: Sequence[Path] = ()
    if _has_both(name, place, options):
        _require_no_labels(name, path, labels)
        both = FORMATS[name].both
        assert both is not None
        _require_options(name, both, options)
        train, test_data = both(path, **options)
        skipped = FORMATS[name].skipped(place)
    else:
        train, test_data = _load(name, path, labels, options).split(test, seed=seed)
    if say is not None:
        rest = f"; skipped: {', '.join(map(str, skipped))}" if skipped else ""
        say(f"training data: {train!r}; test data: {test_data!r}{rest}")
    return train, test_data


def load_to_test(
    path: PathLike,
    labels: PathLike | None = None,
    *,
    format: str | None = None,
    known: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Open data to test a model on: the test part if the data are split, else all samples.

    Args:
        path, labels, format, options: as for `load`.
        known: options applied if the format has them and `options` does not set them, such as the
            names of the classes that the model has learned.
    Returns:
        The data set.
    Raises:
        UserError: as for `load`.

    Local.
    """
    name, place = _format_of(path, format)
    two = _has_both(name, place, options)
    reader: Any = FORMATS[name].both if two else FORMATS[name].load
    taken = inspect.signature(reader).parameters if reader else ()
    options = {key: value for key, value in (known or {}).items() if key in taken} | options
    if two:
        return load_train_test(path, labels, format=format, **options)[1]
    return _load(name, path, labels, options)


def _has_both(name: str, place: Path, options: Mapping[str, Any]) -> bool:
    """Return True if the data are split into training and test, and folders are not named classes.

    The option `names` (of all classes) says that folders named "train" or "test" are classes.
    """
    known = FORMATS[name]
    return known.both is not None and "names" not in options and known.has_both(place)


def _format_of(path: PathLike, format: str | None) -> tuple[str, Path]:
    place = checked_path("path", path, "file or folder")
    if format is not None:
        return choice("format", format, tuple(FORMATS)), place
    for name, known in FORMATS.items():
        if known.matches(place):
            return name, place
    if not place.exists():
        raise UserError(f"{path}: there is no such file")
    raise UserError(f"{path}: its format is not known: give format=, one of {', '.join(FORMATS)}")


def _load(name: str, path: PathLike, labels: PathLike | None, options: dict[str, Any]) -> Dataset:
    reader = FORMATS[name].load
    if reader is None:
        raise UserError(f"{path} must be a folder of training and test data, in {name} files")
    if not FORMATS[name].labels:
        _require_no_labels(name, path, labels)
        _require_options(name, reader, options)
        return reader(path, **options)
    if labels is None:
        raise UserError(f"{path} needs labels: the {name} file of y")
    if not FORMATS[name].matches(checked_path("labels", labels, "file")):
        raise UserError(f"labels={shown(labels)} must be named like the {name} file of x, {path}")
    kinds = {named(Path(one).stem).kind for one in (path, labels)} - {""}
    if len(kinds) > 1:
        raise UserError(
            f"labels={shown(labels)} belongs to a different part of the data than {path}"
        )
    _require_options(name, reader, options)
    return reader(path, labels, **options)


def _require_no_labels(name: str, path: PathLike, labels: PathLike | None) -> None:
    if labels is not None:
        raise UserError(f"labels={shown(labels)}: {path} ({name}) has labels of its own")


def _require_options(name: str, reader: Callable[..., Any], options: dict[str, Any]) -> None:
    known = [
        parameter.name
        for parameter in inspect.signature(reader).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for option, value in options.items():
        if option not in known:
            which = f"it has {', '.join(known)}" if known else "it has none"
            raise UserError(f"{option}={shown(value)} is not an option of {name} data: {which}")
