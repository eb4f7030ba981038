"""Which files and folders are to train on, and which to test on: by the words in their names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from ...errors import UserError
from ...validation import shown

#: The words of each kind of part; to train on one, to test on a "test", or else a "validation".
WORDS = {
    "train": ("train", "training", "trn"),
    "validation": (
        *("val", "valid", "validate", "validation", "dev", "devel", "development"),
        *("eval", "evaluation"),
    ),
    "test": ("test", "testing", "tst", "holdout", "heldout"),
}

#: Words beside them that say nothing: x_train, train_images, test-data.
NEUTRAL = {"x", "y", "set", "data", "dataset", "split", "part", "of", "files", "file"}
NEUTRAL |= {"images", "image", "imgs", "img", "features", "labels", "shard", "fold"}

_KINDS = {word: kind for kind, words in WORDS.items() for word in words}
_WORD = re.compile(
    rf"[xy]?({'|'.join(sorted(_KINDS, key=len, reverse=True))})s?(?:{'|'.join(sorted(NEUTRAL))})?"
)
_LETTERS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SUFFIXES = re.compile(r"(\.(csv|tsv|txt|tokens|raw|gz|parquet|arrow|feather))+$", re.IGNORECASE)
_HOLD_OUT = re.compile(r"(hold|held)[-_. ]out", re.IGNORECASE)

#: Names of files and folders that systems and programs leave beside data: never data.
LITTER = {
    *("__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found"),
    *("__pycache__", "thumbs.db", "desktop.ini"),
}


def is_system_file(name: str) -> bool:
    """Whether a file or folder is hidden, or known to be no data."""
    return name.startswith(".") or name.lower() in LITTER


class Named(NamedTuple):
    """What the name of a file or folder says.

    Attributes:
        kind: "train", "validation" or "test"; "" where it says none of them, or several.
        word: the word that says it, in small letters.
        others: what other words there are, but for the neutral ones.
    """

    kind: str
    word: str
    other_words: frozenset[str]


def named(name: str) -> Named:
    """What a name, without its suffixes, says. Local.

    >>> named("seg_test")
    Named(kind='test', word='test', others=frozenset({'seg'}))
    >>> [named(name).kind for name in ("X_train", "valSet2017", "latest", "train_valid")]
    ['train', 'validation', '', '']
    """
    words = [word.lower() for word in _LETTERS.findall(_HOLD_OUT.sub(r"\1out", name))]
    found = {match[1] for word in words if (match := _WORD.fullmatch(word))}
    other_words = frozenset(w for w in words if w not in NEUTRAL and not _WORD.fullmatch(w))
    kinds = {_KINDS[word] for word in found}
    kind = kinds.pop() if len(kinds) == 1 else ""
    return Named(kind, "/".join(sorted(found)), other_words)


REQUIRED = "one part to train on and one to test on, named so (train, test, validation, dev …)"


def both_parts(place: Path) -> str:
    """What is wrong where one data set was asked for, and two are there."""
    return f"{place} holds data to train on and data to test on: data.load_train_test gives both"


@dataclass(frozen=True)
class Parts:
    """Files or folders by what they are for, each in the order of their names.

    Attributes:
        left_out: to validate on, beside those to test on.
    """

    train: tuple[Path, ...]
    test: tuple[Path, ...]
    skipped: tuple[Path, ...] = ()


def parts_of(place: Path, entries: Sequence[Path], *, classes: bool = False) -> Parts | None:
    """Find the parts among files or folders that lie in one folder.

    Args:
        place: that folder, for errors.
        entries: the files and folders that hold data.
        classes: folders may be named after classes: "bullet_train" and "test_tube" are no parts,
            unless both of "bullet_train" and "bullet_test" are there.
    Returns:
        The parts; None where there are none: no name is one of a part, or all are of one kind.
    Raises:
        UserError: it is in doubt which files are to train on and which to test on.

    Local.
    """
    says = {path: named(_stem(path)) for path in sorted(entries)}
    if classes:
        says = _parts_alone(says)
    of_kind = {kind: [p for p, said in says.items() if said.kind == kind] for kind in (*WORDS, "")}
    train, validation, test, other_words = of_kind.values()
    if not (train or validation or test) or sum(map(bool, of_kind.values())) == 1:
        return None
    twice = any(len({says[path].word for path in of_kind[kind]}) > 1 for kind in WORDS)
    if other_words or twice or not train:
        held = "; ".join(
            f"{shown([path.name for path in paths])} {_FOR[kind]}"
            for kind, paths in of_kind.items()
            if paths
        )
        raise UserError(
            f"{place} must hold {REQUIRED}, and no others, or no parts at all: it holds {held}"
        )
    return Parts(tuple(train), tuple(test or validation), tuple(validation if test else ()))


_NEITHER = Named("", "", frozenset())
_FOR = {
    "train": "to train on",
    "validation": "to validate on",
    "test": "to test on",
    "": "named as neither",
}


def kinds_of(entries: Sequence[Path]) -> dict[Path, str]:
    """Which part each of a folder's entries is, or "": see `parts_of` with `classes`. Local."""
    says = {entry: named(_stem(entry)) for entry in entries}
    return {entry: said.kind for entry, said in _parts_alone(says).items()}


def _parts_alone(says: dict[Path, Named]) -> dict[Path, Named]:
    """What the names of parts say, and nothing of those that are named after a class."""
    kinds_by_words: dict[frozenset[str], set[str]] = {}
    for said in says.values():
        if said.kind:
            kinds_by_words.setdefault(said.other_words, set()).add(said.kind)
    return {
        path: said
        if not said.other_words or len(kinds_by_words.get(said.other_words, ())) > 1
        else _NEITHER
        for path, said in says.items()
    }


def _stem(path: Path) -> str:
    """The name without its suffixes: of x.train.csv.gz, "x.train"."""
    return _SUFFIXES.sub("", path.name)


def files_below(
    folder: Path,
    wanted: Callable[[str], bool],
    skipped: Callable[[str], bool] = lambda name: False,
) -> Iterable[tuple[str, os.stat_result]]:
    """Find the files below a folder whose name is wanted, in no particular order: the path below
    the folder, and the file's status.

    Args:
        left_out: whether a folder of this name is not looked into.
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
