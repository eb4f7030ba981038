"""Data files: memory-mapped, so that a rank reads only its part; no code in them is ever run."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from ..errors import UserError
from ..files import opened
from ..validation import checked_path, line_of, require_memory
from .dataset import Arrays
from .idx import is_idx, load_idx
from .images import Images
from .sizes import require_bytes, require_deflatable
from .validation import Array

ZIP_LOCAL_HEADER = struct.Struct("<4s22xHH")  #: signature, then lengths of name and extra field
ENCRYPTED = 0x1
MALFORMED = (ValueError, OverflowError, EOFError, OSError, struct.error)


def load(path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None) -> Arrays:
    """Open a data set in NumPy's file formats; the samples themselves are read as they are used.

    Args:
        path: a ``.npz`` file that holds arrays x and y, as `numpy.savez` writes it; or a ``.npy``
            file of x; or an IDX file of x (`load_idx`), which is known by "-idx" or ".idx" in its
            name: images of bytes (ubyte [n, height, width]) are read as floats in 0 to 1.
        labels: a ``.npy`` or IDX file of y, with a file of the same kind of x.
    Returns:
        The data set. Arrays are memory-mapped, those inside a ``.npz`` file too, except that
        compressed ones (`numpy.savez_compressed`) and IDX files are read whole into memory by every
        rank. The zip file's checksums are verified for compressed arrays only.
    Raises:
        UserError: a file is missing, malformed, truncated, not readable or no regular file, holds
            Python objects (which could execute code) or more than memory does, or x and y do not
            fit together.

    Local.
    """
    file = checked_path("path", path, "file")
    if labels is not None:
        labels = checked_path("labels", labels, "file")
    suffixes = [Path(p).suffix.lower() for p in (path, labels) if p is not None]
    if suffixes == [".npz"]:
        return Arrays(_npz_member(file, "x"), _npz_member(file, "y"), name=str(path))
    if suffixes == [".npy", ".npy"] and labels is not None:
        return Arrays(_npy(file), _npy(Path(labels)), name=f"{path}, {labels}")
    if labels is not None and is_idx(file) and is_idx(Path(labels)):
        x = load_idx(file)
        kind = Images if x.dtype == np.uint8 and x.ndim > 2 else Arrays
        return kind(x, load_idx(labels), name=f"{path}, {labels}")
    given = str(path) if labels is None else f"{path}, {labels}"
    raise UserError(
        f"{given}: a data set must be one .npz file, or .npy or IDX files of x and of y"
    )


def _npy(path: Path) -> Array:
    with opened(str(path), path) as file:
        return _mapped(str(path), file, 0, _size(file))


def _npz_member(path: Path, name: str) -> Array:
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
    """Read the head of an array in ``.npy`` format: shape, whether in Fortran order, dtype."""
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        version = npy.read_magic(file)
        shape, fortran, dtype = readers[version](file)
    except KeyError:
        raise UserError(f"{what} must hold plain numbers, not structures") from None
    except Exception as error:  # NumPy's parser lets through whatever a damaged header provokes
        raise UserError(f"{what} is not a well-formed .npy array: {line_of(error)}") from None
    if dtype.hasobject:
        raise UserError(f"{what} must hold plain numbers: it has dtype {dtype}, Python objects")
    if any(n < 0 for n in shape):
        raise UserError(f"{what} is not a well-formed .npy array: its shape is {shape}")
    return shape, fortran, dtype


def _mapped(what: str, file: IO[bytes], begin: int, end: int) -> Array:
    """Memory-map the array in ``.npy`` format that lies in a part of a file."""
    file.seek(begin)
    shape, fortran, dtype = _header(what, file)
    offset = file.tell()
    size = require_bytes(what, shape, dtype, min(end, _size(file)) - offset)
    order: Any = "F" if fortran else "C"
    try:
        if size == 0:
            return np.empty(shape, dtype, order)
        return np.memmap(file, dtype, mode="r", offset=offset, shape=shape, order=order)
    except (ValueError, OverflowError) as error:  # more, or larger, dimensions than NumPy has
        raise UserError(f"{what} is not a well-formed .npy array: {line_of(error)}") from None
    except (OSError, MemoryError) as error:  # address space, or what the file system can
        raise UserError(f"{what} cannot be mapped into memory: {line_of(error)}") from None


def _decompressed(what: str, member: IO[bytes], length: int) -> Array:
    """Read the array in ``.npy`` format that a compressed member of a zip file is."""
    shape, _, dtype = _header(what, member)  # refuses objects before anything else is read
    size = require_bytes(what, shape, dtype, length - member.tell())
    require_memory(what, size)
    member.seek(0)
    try:
        array: Array = npy.read_array(member, allow_pickle=False)
    except MemoryError:
        raise UserError(f"{what} does not fit into memory: it has {size:,} bytes") from None
    return array


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size
