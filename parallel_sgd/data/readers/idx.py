"""IDX files, the format of MNIST: a magic number, big-endian sizes, and then the numbers."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...errors import UserError
from ...files import opened, reason
from ...validation import checked_path, line_of, require_memory
from ..validation import Array, require_bytes, require_deflatable

#: The third byte of the magic number; all numbers are big-endian.
TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}

CHUNK = 1 << 20  #: bytes decompressed at a time


def load_idx(path: str | os.PathLike[str]) -> Array:
    """Read an IDX file whole into memory: ubyte, byte, short, int, float or double.

    Args:
        path: of the file; a file whose name ends in ``.gz`` is decompressed while reading.
    Returns:
        An array of the file's type and sizes, in native byte order, owned by the caller.
    Raises:
        UserError: the file is missing, not readable or no regular file, has another magic number,
            is truncated or longer than its sizes require, or requires more than memory holds. A
            size larger than the file can hold is refused before memory is allocated.

    Local. Format: http://yann.lecun.com/exdb/mnist, at the end of the page.
    """
    file_path = checked_path("path", path, "file")
    what = str(path)
    with opened(what, file_path) as file:
        length = os.fstat(file.fileno()).st_size
        try:
            if file_path.suffix.lower() != ".gz":
                return _read(what, file.read, length)
            with gzip.GzipFile(fileobj=file) as decompressed:
                return _read(what, decompressed.read, length, compressed=True)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{what} is not a well-formed gzip file: {line_of(error)}") from None
        except OSError as error:
            raise UserError(f"{what} cannot be read: {reason(error)}") from None


def is_idx(path: Path) -> bool:
    """Return True if a file is named as IDX: train-images-idx3-ubyte.gz, or x.idx. Local."""
    name = path.name.lower()
    return "-idx" in name or ".idx" in name


def mapped_idx(path: str | os.PathLike[str]) -> Array:
    """Memory-map an IDX file, unless compressed: numbers are read as they are used.

    Args, Raises: as for `load_idx`.
    Returns:
        A read-only array of the file's type and sizes, big-endian; for a ``.gz`` file the result of
        `load_idx`.

    Local.
    """
    file_path = checked_path("path", path, "file")
    if file_path.suffix.lower() == ".gz":
        return load_idx(path)
    what = str(path)
    with opened(what, file_path) as file:
        try:
            dtype, shape = _head(what, file.read)
            size, have = math.prod(shape) * dtype.itemsize, _left(file)
            if require_bytes(what, shape, dtype, have) < have:
                raise _too_long(what, shape, size)
            if size == 0:
                return np.empty(shape, dtype)
            return np.memmap(file, dtype, mode="r", offset=file.tell(), shape=shape)
        except UserError:
            raise
        except (ValueError, OverflowError) as error:  # more or larger dimensions than NumPy allows
            raise UserError(f"{what} is not a well-formed IDX file: {line_of(error)}") from None
        except OSError as error:
            raise UserError(f"{what} cannot be mapped into memory: {reason(error)}") from None


def _head(what: str, read: Callable[[int], bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Read the magic number [0, 0, type, dimensions], and a uint32 for each dimension.

    Args:
        read: returns the next n bytes, or fewer at the end.
    """
    magic = read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or magic[3] == 0:
        raise UserError(
            f"{what} is not an IDX file: it must begin with the bytes 0, 0, a type (of "
            f"{', '.join(map(str, TYPES))}) and the number of dimensions: it begins with "
            f"{list(magic)}"
        )
    dtype, dimensions = np.dtype(TYPES[magic[2]]), magic[3]
    sizes = read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise UserError(
            f"{what} is truncated: {len(sizes)} bytes of sizes, its {dimensions} dimensions "
            f"require {4 * dimensions}"
        )
    return dtype, struct.unpack(f">{dimensions}I", sizes)


def _read(
    what: str, read: Callable[[int], bytes], length: int, *, compressed: bool = False
) -> Array:
    """Read the header, and then the numbers.

    Args:
        read: returns the next n bytes, or fewer at the end.
        length: size of the file on the disk, in bytes.
    """
    dtype, shape = _head(what, read)
    head = 4 + 4 * len(shape)
    size = math.prod(shape) * dtype.itemsize
    if compressed:
        require_deflatable(what, head + size, length)
    elif require_bytes(what, shape, dtype, length - head) < length - head:
        raise _too_long(what, shape, size)
    require_memory(what, size)
    try:
        content = np.empty(size, np.uint8)
        array: Array = content.view(dtype).reshape(shape)
    except (ValueError, OverflowError) as error:  # more or larger dimensions than NumPy allows
        raise UserError(f"{what} is not a well-formed IDX file: {line_of(error)}") from None
    except MemoryError:
        raise UserError(f"{what} does not fit into memory: it has {size:,} bytes") from None
    for begin in range(0, size, CHUNK):
        wanted = content[begin : begin + CHUNK]
        chunk = np.frombuffer(read(len(wanted)), np.uint8)
        if len(chunk) < len(wanted):
            require_bytes(what, shape, dtype, begin + len(chunk))
        wanted[:] = chunk
    if read(1):
        raise _too_long(what, shape, size)
    return array if dtype.isnative else array.byteswap(inplace=True).view(dtype.newbyteorder("="))


def _left(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size - file.tell()


def _too_long(what: str, shape: tuple[int, ...], size: int) -> UserError:
    return UserError(f"{what} is longer than its sizes {list(shape)} require: {size} bytes of data")
