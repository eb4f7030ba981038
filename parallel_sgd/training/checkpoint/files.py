"""Files of a checkpoint: names, checksums, and a write order safe against kills.

    <folder>/000000012800/rank-00000.safetensors    the arrays of rank 0
                          rank-00000.json           the numbers of rank 0
                          ...
                          manifest.json             description, and size and checksum of every file

The folder's name is the number of samples seen. All files are written to a folder of the same name
with ``.part`` and flushed to the disk, the manifest last. Then the folder is renamed. A folder
without a manifest, or with files that do not match the manifest, is not a checkpoint. Nothing is
pickled. No link in the folder is followed when files are written or removed. Everything here is
local.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...array_files import (
    ArrayInFile,
    Fact,
    HostArray,
    checksum,
    flushed,
    open_arrays,
    write_arrays,
)
from ...errors import UserError
from ...files import content_of, make_new, reason, remove_tree
from ...validation import shown
from .schema import FORMAT, READABLE, check_manifest, check_numbers, converted, parsed

__all__ = ["CHECKPOINTS", "FORMAT", "Damaged", "Reader"]

CHECKPOINTS = "checkpoints"  #: subfolder of a run's folder
MANIFEST = "manifest.json"
NAME = re.compile(r"(\d{12,})(?:-(\d+))?")
PART = re.compile(rf"{NAME.pattern}(\.\d+)?\.part")
CHECKSUM_FIELD = ',\n  "sha256": "'

Facts = dict[str, Fact]  #: size and checksum of files, by name


class Damaged(UserError):
    """A checkpoint differs from the state in which it was written."""


def write_rank(
    part: Path, rank: int, arrays: Mapping[str, HostArray], numbers: Mapping[str, Any]
) -> Facts:
    """Write and flush the two files of a rank.

    Returns:
        Size and checksum of both files, for the manifest.
    """
    path = part / f"rank-{rank:05d}.safetensors"
    facts = {path.name: write_arrays(path, arrays)}
    path = path.with_suffix(".json")
    make_new(path)
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    return facts | {path.name: flushed(path)}


def publish(part: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, then rename the folder, which makes it a checkpoint."""
    text = json.dumps(manifest, indent=2)
    body = text.removesuffix("\n}") + CHECKSUM_FIELD
    aside = part / f".{MANIFEST}.part"
    make_new(aside)
    aside.write_text(f'{body}{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n')
    flushed(aside)
    os.replace(aside, part / MANIFEST)
    _flush_folder(part)
    os.rename(part, final)
    _flush_folder(final.parent)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint.

    Raises:
        Damaged: the manifest is missing, or differs from its checksum.
        UserError: the checkpoint has an unsupported format.
    """
    if path.name.endswith(".part"):
        raise Damaged(f"checkpoint {str(path)!r} is a partial write, which was never finished")
    try:
        exists = (path / MANIFEST).exists()
    except OSError as error:  # no permission to search the folder
        raise Damaged(f"checkpoint {str(path)!r} cannot be read: {error}") from error
    if not exists:
        raise Damaged(f"checkpoint {str(path)!r} is not whole: it has no {MANIFEST}")
    with _errors_as_damage(path, MANIFEST):
        data = content_of(MANIFEST, path / MANIFEST)
    body, field, _ = data.rpartition(CHECKSUM_FIELD.encode())
    body += field
    if not field or data != body + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n':
        raise Damaged(
            f"checkpoint {str(path)!r} is damaged: {MANIFEST} does not match its checksum"
        )
    with _errors_as_damage(path, MANIFEST):
        manifest: dict[str, Any] = parsed(data)
        version = manifest.get("format") if isinstance(manifest, dict) else None
        if version is None:
            raise UserError("'format' is missing")
    if version not in READABLE:
        raise UserError(
            f"checkpoint {str(path)!r} has format {shown(version)}, written by parallel_sgd "
            f"{shown(manifest.get('parallel_sgd'))}; this version reads formats "
            f"{', '.join(map(str, READABLE[:-1]))} and {READABLE[-1]}"
        )
    with _errors_as_damage(path, MANIFEST):
        check_manifest(manifest)
    return manifest


@contextmanager
def _errors_as_damage(path: Path, name: str) -> Iterator[None]:
    """Turn errors of one file into `Damaged`, with the file's name."""
    try:
        yield
    except Damaged:
        raise
    except UserError as error:
        raise Damaged(f"checkpoint {str(path)!r} is damaged: {name}: {error}") from None


class Reader:
    """Reads the files of one checkpoint. Each file is verified before use.

    Args:
        path: the folder of the checkpoint.
        manifest: the result of `read_manifest`.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self._version = path, manifest["format"]
        self.files: Facts = manifest["files"]
        self._tensors: dict[int, Any] = {}

    def numbers(self, rank: int) -> dict[str, Any]:
        """Return the content of a rank's JSON file, converted to the present format. Raises
        Damaged."""
        name = f"rank-{rank:05d}.json"
        self._verify(name)
        with self._reading(name):
            data = content_of(name, self.path / name)
        with _errors_as_damage(self.path, name):
            numbers: dict[str, Any] = parsed(data)
            check_numbers(numbers)
        try:
            return converted(numbers, self._version)
        except UserError as error:
            raise UserError(f"checkpoint {str(self.path)!r}: {name}: {error}") from None

    def verify(self, rank: int) -> None:
        """Verify the arrays of a rank. Raises Damaged."""
        name = f"rank-{rank:05d}.safetensors"
        self._verify(name)
        with self._reading(name):
            self._tensors[rank] = open_arrays(self.path / name)

    def arrays(self, rank: int) -> dict[str, ArrayInFile]:
        """Return all arrays of a verified rank, by name. Each array is read on first use."""
        with self._reading(f"rank-{rank:05d}.safetensors"):
            tensors = self._tensors[rank]
            return {name: ArrayInFile(tensors, name) for name in tensors.keys()}  # noqa: SIM118

    def verify_shared(self) -> None:
        """Verify all files that belong to no rank, such as those of servers. Raises Damaged."""
        for name in self.files:
            if not name.startswith("rank-"):
                self._verify(name)

    def _verify(self, name: str) -> None:
        expected = self.files.get(name)
        with self._reading(name):
            if expected is None or not (self.path / name).exists():
                raise self._damaged(f"{name} is missing")
            size = (self.path / name).stat().st_size
            if size != expected["bytes"]:
                raise self._damaged(f"{name} has {size} bytes instead of {expected['bytes']}")
            if checksum(self.path / name) != expected["sha256"]:
                raise self._damaged(f"{name} does not match its checksum")

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except Damaged:
            raise
        except Exception as error:
            raise self._damaged(f"{name} cannot be read: {error}") from error

    def _damaged(self, what: str) -> Damaged:
        return Damaged(f"checkpoint {str(self.path)!r} is damaged: {what}")


def require_whole(path: Path) -> None:
    """Verify every file of a checkpoint. Raises Damaged."""
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    for rank in range(manifest["ranks"]):
        reader.numbers(rank)
        reader.verify(rank)
    reader.verify_shared()


def checkpoints_in(folder: Path) -> list[Path]:
    """List the paths with a checkpoint's name, fewest samples first. The list is empty without a
    folder.

    Raises:
        UserError: the path is not a folder, or cannot be read.
    """
    try:
        checkpoints = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"{str(folder)!r} must be a folder of checkpoints: {reason(error)}"
        ) from error
    return sorted(checkpoints, key=lambda path: sort_key(path.name))


def sort_key(name: str) -> tuple[int, int]:
    """Return the sort key of a checkpoint's name: samples, then the number among equal samples."""
    match = NAME.fullmatch(name)
    assert match
    return int(match[1]), int(match[2] or 0)


def begin(folder: Path, samples: int) -> Path:
    """Make an empty ``.part`` folder for a checkpoint. Remove ``.part`` folders left by a kill.

    Returns:
        The future path of the checkpoint, which does not exist yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if PART.fullmatch(path.name):
            remove_tree(path)
    same = [sort_key(p.name)[1] for p in checkpoints_in(folder) if sort_key(p.name)[0] == samples]
    name = f"{samples:012d}" + (f"-{max(same) + 1}" if same else "")
    part_of(folder / name).mkdir()
    return folder / name


def part_of(path: Path) -> Path:
    """Return the temporary path of a checkpoint while it is written."""
    return path.with_name(path.name + ".part")


def remove(path: Path) -> None:
    """Remove a checkpoint. Rename it first, so that no partial checkpoint is ever seen under its
    name."""
    number = 0
    while os.path.lexists(renamed := path.with_name(f"{path.name}.{number}.part")):
        number += 1
    os.rename(path, renamed)
    remove_tree(renamed)


def set_aside_after(path: Path) -> None:
    """Rename all checkpoints newer than this one (``.aside``), of training now abandoned."""
    key = sort_key(path.name)
    for later in [saved for saved in checkpoints_in(path.parent) if sort_key(saved.name) > key]:
        number = 0
        while os.path.lexists(aside := later.with_name(f"{later.name}.aside{number or ''}")):
            number += 1
        os.rename(later, aside)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
