"""NumPy and IDX files, memory-mapped: a rank reads only its part. No code in a file is ever run."""

from __future__ import annotations

import os
import re
import struct
import threading
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from ...errors import UserError
from ...files import opened
from ...validation import checked_path, line_of, require_memory, shown
from ..dataset import Arrays, Images
from ..validation import Array, require_bytes, require_deflatable
from .idx import mapped_idx
from .parts import REQUIRED, Parts, parts_of

ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")  #: signature, then lengths of name and extra field
ENCRYPTED = 0x1
OF_Y = re.compile("label|target")  #: in names of arrays y
_PARSES_HEADER = threading.Lock()
"""Held while NumPy parses a header by `ast`: in several threads of Python 3.11 this fails at random
(gh-106905)."""

MALFORMED = (ValueError, OverflowError, EOFError, OSError, struct.error)


def load_npz(path: str | os.PathLike[str]) -> Arrays:
    """Open the arrays x and y of a ``.npz`` file, as written by `numpy.savez`.

    Args:
        path: of the file.
    Returns:
        The data set, memory-mapped. Compressed arrays (`numpy.savez_compressed`) are read whole
        into memory by every rank; only their checksums are verified.
    Raises:
        UserError: the file is missing, malformed, truncated, not readable or no regular file; holds
            Python objects (which could execute code) or more than memory does; or x and y do not
            fit together.

    Local.
    """
    file = checked_path("path", path, "file")
    return Arrays(npz_member(file, "x"), npz_member(file, "y"), name=str(path))


def npz_parts(path: str | os.PathLike[str]) -> tuple[Arrays, Arrays]:
    """Open the arrays x_train, y_train, x_test and y_test of a ``.npz`` file as (training, test).

    Names with the same meaning are accepted as for `parquet_parts`: train_images, val_labels.

    Raises:
        UserError: as for `load_npz`; or there are no such arrays, or their names leave doubt.

    Local.
    """
    file = checked_path("path", path, "file")
    parts = find_npz_parts(file)
    if parts is None:
        raise UserError(f"{file} must hold arrays of {REQUIRED}")
    train, test = (_npz_part(file, list(map(str, part))) for part in (parts.train, parts.test))
    return train, test


def find_npz_parts(path: Path) -> Parts | None:
    """Return the parts of a file by the names of its arrays, as `parts_of`. Local."""
    names = npz_names(path)
    return None if {"x", "y"} <= set(names) else parts_of(path, [Path(name) for name in names])


def _npz_part(file: Path, names: list[str]) -> Arrays:
    y = [name for name in names if name.lower().startswith("y") or OF_Y.search(name.lower())]
    x = [name for name in names if name not in y]
    if len(x) != 1 or len(y) != 1:
        raise UserError(f"{file} must hold one x and one y of each part: it holds {shown(names)}")
    name = f"{file}, {x[0]} and {y[0]}"
    return Arrays(npz_member(file, x[0]), npz_member(file, y[0]), name=name)


def load_npy(path: str | os.PathLike[str], labels: str | os.PathLike[str]) -> Arrays:
    """Open a ``.npy`` file of x and a ``.npy`` file of y, memory-mapped; see `load_npz`. Local."""
    files = checked_path("path", path, "file"), checked_path("labels", labels, "file")
    return Arrays(*map(_npy, files), name=f"{path}, {labels}")


def load_idx_pair(path: str | os.PathLike[str], labels: str | os.PathLike[str]) -> Arrays:
    """Open an IDX file of x and an IDX file of y, memory-mapped.

    Every rank reads a ``.gz`` file whole. Images of bytes (ubyte [n, height, width]) become floats
    in 0 to 1 as they are read. Local.
    """
    x, y = mapped_idx(path), mapped_idx(labels)
    kind = Images if x.dtype == np.uint8 and x.ndim > 2 else Arrays
    return kind(x, y, name=f"{path}, {labels}")


def _npy(path: Path) -> Array:
    with opened(str(path), path) as file:
        return _mapped(str(path), file, 0, _size(file))


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays in a ``.npz`` file. Local.

    Raises:
        UserError: the file is missing, malformed, or no regular file.
    """
    with opened(str(path), path) as file:
        try:
            return [name.removesuffix(".npy") for name in zipfile.ZipFile(file).namelist()]
        except (*MALFORMED, zipfile.BadZipFile, NotImplementedError) as error:
            raise UserError(f"{path} is not a well-formed .npz file: {line_of(error)}") from None


def npz_member(path: Path, name: str) -> Array:
    """Read one array of a ``.npz`` file, as described at `load_npz`. Local."""
    what = f"{path}: {name}"
    with opened(str(path), path) as file:
        try:
            archive = zipfile.ZipFile(file)
            members = {info.filename: info for info in archive.infolist()}
            info = members.get(f"{name}.npy")
            if info is None:
                held = sorted(member.removesuffix(".npy") for member in members)
                raise UserError(f"{path} must hold arrays x and y: it holds {held}")
            if info.flag_bits & ENCRYPTED:
                raise UserError(f"{what} must not be encrypted")
            if info.compress_type == zipfile.ZIP_STORED:
                file.seek(info.header_offset)
                signature, name_length, extra_length = ZIP_LOCAL_HEADER.unpack(
                    file.read(ZIP_LOCAL_HEADER.size)
                )
                if signature != b"PK\x03\x04":
                    raise zipfile.BadZipFile("no local header")
                begin = info.header_offset + ZIP_LOCAL_HEADER.size + name_length + extra_length
                return _mapped(what, file, begin, begin + info.file_size)
            if info.compress_type == zipfile.ZIP_DEFLATED:
                require_deflatable(what, info.file_size, info.compress_size)
            with archive.open(info) as member:
                return _decompressed(what, member, info.file_size)
        except UserError:
            raise
        except (*MALFORMED, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise UserError(f"{path} is not a well-formed .npz file: {line_of(error)}") from None


def _header(what: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array in ``.npy`` format: shape, Fortran order or not, dtype."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        version = npy.read_magic(file)
        with _PARSES_HEADER:
            shape, fortran, dtype = readers[version](file)
    except KeyError:
        raise UserError(f"{what} must hold plain numbers, not structures") from None
    except Exception as error:  # NumPy's parser raises any exception for a damaged header
        raise UserError(f"{what} is not a well-formed .npy array: {line_of(error)}") from None
    if dtype.hasobject:
        raise UserError(f"{what} must hold plain numbers: it has dtype {dtype}, Python objects")
    if any(n < 0 for n in shape):
        raise UserError(f"{what} is not a well-formed .npy array: its shape is {shape}")
    return shape, fortran, dtype


def _mapped(what: str, file: IO[bytes], begin: int, end: int) -> Array:
    """Memory-map the array in ``.npy`` format in the bytes `begin` to `end` of a file."""
    file.seek(begin)
    shape, fortran, dtype = _header(what, file)
    offset = file.tell()
    size = require_bytes(what, shape, dtype, min(end, _size(file)) - offset)
    order: Any = "F" if fortran else "C"
    try:
        if size == 0:
            return np.empty(shape, dtype, order)
        return np.memmap(file, dtype, mode="r", offset=offset, shape=shape, order=order)
    except (ValueError, OverflowError) as error:  # more or larger dimensions than NumPy allows
        raise UserError(f"{what} is not a well-formed .npy array: {line_of(error)}") from None
    except (OSError, MemoryError) as error:  # no address space, or not supported by the file system
        raise UserError(f"{what} cannot be mapped into memory: {line_of(error)}") from None


def _decompressed(what: str, member: IO[bytes], length: int) -> Array:
    """Read a compressed member of a zip file: an array in ``.npy`` format."""
    shape, _, dtype = _header(what, member)  # refuses objects before reading data
    size = require_bytes(what, shape, dtype, length - member.tell())
    require_memory(what, size)
    member.seek(0)
    try:
        with _PARSES_HEADER:
            array: Array = npy.read_array(member, allow_pickle=False)
    except MemoryError:
        raise UserError(f"{what} does not fit into memory: it has {size:,} bytes") from None
    return array


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
