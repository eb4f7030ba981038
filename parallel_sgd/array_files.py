"""Files of named arrays (safetensors), flushed to the disk, with size and checksum. Local."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from .communication import InBackground
from .errors import UserError

HostArray = npt.NDArray[Any]
Fact = dict[str, Any]  #: size and checksum of a file: ``{"bytes": …, "sha256": …}``


def require_safetensors() -> Any:
    """The library's module `safetensors.numpy`.

    Raises:
        UserError: it is not installed.
    """
    try:
        importlib.import_module("safetensors")
        return importlib.import_module("safetensors.numpy")
    except ImportError as error:
        raise UserError(
            f"checkpoints need safetensors ({error}): pip install 'parallel_sgd[checkpoint]'"
        ) from error


def write_arrays(path: Path, arrays: Mapping[str, HostArray]) -> Fact:
    """Write contiguous arrays to a file, and bring it to the disk."""
    require_safetensors().save_file(dict(arrays), path)
    return flushed(path)


def open_arrays(path: Path) -> Any:
    """A file of arrays: `keys()` are their names, `get_tensor(name)` reads one."""
    require_safetensors()
    return importlib.import_module("safetensors").safe_open(path, framework="numpy")


def flushed(path: Path) -> Fact:
    """Bring a file to the disk; its size and checksum."""
    with path.open("rb") as file:
        flushing = InBackground(f"flush {path.name}", lambda: os.fsync(file.fileno()))
        found = hashlib.file_digest(file, "sha256").hexdigest()
        flushing.result()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": found}


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
