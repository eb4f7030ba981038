"""Training, validation and test parts of data, recognized by names of files and folders."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from ...errors import UserError
from ...validation import shown

#: The words for each kind of part. The test part is "test", or else "validation".
WORDS = {
    "train": ("train", "training", "trn"),
    "validation": (
        *("val", "valid", "validate", "validation", "dev", "devel", "development"),
        *("eval", "evaluation"),
    ),
    "test": ("test", "testing", "tst", "holdout", "heldout"),
}

#: Neutral words in names of parts: x_train, train_images, test-data.
NEUTRAL = {"x", "y", "set", "data", "dataset", "split", "part", "of", "files", "file"}
NEUTRAL |= {"images", "image", "imgs", "img", "features", "labels", "shard", "fold"}

_KINDS = {word: kind for kind, words in WORDS.items() for word in words}
_WORD = re.compile(
    rf"[xy]?({'|'.join(sorted(_KINDS, key=len, reverse=True))})s?(?:{'|'.join(sorted(NEUTRAL))})?"
)
_LETTERS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SUFFIXES = re.compile(r"(\.(csv|tsv|txt|tokens|raw|gz|parquet|arrow|feather))+$", re.IGNORECASE)
_HOLD_OUT = re.compile(r"(hold|held)[-_. ]out", re.IGNORECASE)

#: Files and folders made by systems and programs, never data.
LITTER = {
    *("__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found"),
    *("__pycache__", "thumbs.db", "desktop.ini"),
}


def is_system_file(name: str) -> bool:
    """Return True if a file or folder is hidden, or a known by-product of a system or program."""
    return name.startswith(".") or name.lower() in LITTER


class Named(NamedTuple):
    """The kind of part named by a file or folder.

    Attributes:
        kind: "train", "validation" or "test"; "" if the name says none of these, or several.
        word: the word for this kind, in lower case.
        others: further words, except neutral ones.
    """

    kind: str
    word: str
    others: frozenset[str]


def named(name: str) -> Named:
    """Return the kind of part for a name without suffixes. Local.

    >>> named("seg_test")
    Named(kind='test', word='test', others=frozenset({'seg'}))
    >>> [named(name).kind for name in ("X_train", "valSet2017", "latest", "train_valid")]
    ['train', 'validation', '', '']
    """
    words = [word.lower() for word in _LETTERS.findall(_HOLD_OUT.sub(r"\1out", name))]
    found = {match[1] for word in words if (match := _WORD.fullmatch(word))}
    others = frozenset(w for w in words if w not in NEUTRAL and not _WORD.fullmatch(w))
    kinds = {_KINDS[word] for word in found}
    kind = kinds.pop() if len(kinds) == 1 else ""
    return Named(kind, "/".join(sorted(found)), others)


REQUIRED = "a training part and a test part, named so (train, test, validation, dev …)"


def both_parts_problem(place: Path) -> str:
    """Return the error for a folder with two parts if a single data set was requested."""
    return f"{place} holds training data and test data: data.load_train_test opens both"


@dataclass(frozen=True)
class Parts:
    """The files or folders of each part, in the order of their names.

    Attributes:
        train: to train on.
        test: to test on.
        skipped: to validate on, if there are files to test on, too.
    """

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    skipped: tuple[Path, ...] = ()


def parts_of(place: Path, entries: Sequence[Path], *, classes: bool = False) -> Parts | None:
    """Find the parts among files or folders of a folder.

    Args:
        place: the folder, for errors.
        entries: the files and folders that hold data.
        classes: True if folders may be named after classes: "bullet_train" and "test_tube" are no
            parts, unless both "bullet_train" and "bullet_test" exist.
    Returns:
        The parts. None if no name is a part's, or all names are of the same kind.
    Raises:
        UserError: the names leave doubt about the training and the test part.

    Local.
    """
    parsed = {path: named(_stem(path)) for path in sorted(entries)}
    if classes:
        parsed = _without_classes(parsed)
    of_kind = {
        kind: [p for p, part in parsed.items() if part.kind == kind] for kind in (*WORDS, "")
    }
    train, validation, test, others = of_kind.values()
    if not (train or validation or test) or sum(map(bool, of_kind.values())) == 1:
        return None
    twice = any(len({parsed[path].word for path in of_kind[kind]}) > 1 for kind in WORDS)
    if others or twice or not train:
        held = "; ".join(
            f"{shown([path.name for path in paths])} {_PURPOSES[kind]}"
            for kind, paths in of_kind.items()
            if paths
        )
        raise UserError(
            f"{place} must hold {REQUIRED}, and nothing else, or no parts: it holds {held}"
        )
    return Parts(tuple(train), tuple(test or validation), tuple(validation if test else ()))


_NO_PART = Named("", "", frozenset())
_PURPOSES = {
    "train": "for training",
    "validation": "for validation",
    "test": "for test",
    "": "of neither name",
}


def kinds_of(entries: Sequence[Path]) -> dict[Path, str]:
    """Return the kind of part of each entry, or "": see `parts_of` with `classes`. Local."""
    parsed = {entry: named(_stem(entry)) for entry in entries}
    return {entry: part.kind for entry, part in _without_classes(parsed).items()}


def _without_classes(parsed: dict[Path, Named]) -> dict[Path, Named]:
    """Keep the kinds of parts, but clear the kinds of names that are a class's."""
    kinds_by_words: dict[frozenset[str], set[str]] = {}
    for part in parsed.values():
        if part.kind:
            kinds_by_words.setdefault(part.others, set()).add(part.kind)
    return {
        path: part if not part.others or len(kinds_by_words.get(part.others, ())) > 1 else _NO_PART
        for path, part in parsed.items()
    }


def _stem(path: Path) -> str:
    """Return the name without its suffixes: "x.train" for x.train.csv.gz."""
    return _SUFFIXES.sub("", path.name)


def files_below(
    folder: Path,
    wanted: Callable[[str], bool],
    skipped: Callable[[str], bool] = lambda name: False,
) -> Iterable[tuple[str, os.stat_result]]:
    """Find all files with wanted names below a folder, in no particular order.

    Args:
        wanted: True for the name of a file to return.
        skipped: True for the name of a folder to skip.
    Yields:
        The path relative to the folder, with "/", and the file's status.
    Raises:
        OSError: a folder, or the status of a file, cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not skipped(name)]
        for name in filter(wanted, names):
            path = Path(place, name)
            yield PurePath(path.relative_to(folder)).as_posix(), path.stat()
