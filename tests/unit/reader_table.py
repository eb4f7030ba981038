"""The formats of data files, one row each: a writer of samples, and the promises of the reader."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from parallel_sgd import data

ROWS = 24
LABELS = np.arange(ROWS) // 8  #: ascending, since images are ordered by class
VALUES = np.arange(1, ROWS + 1)  #: each feature of sample i is VALUES[i]

Paths = tuple[Path, ...]
IDX_CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


@dataclass(frozen=True)
class Row:
    """One format.

    Attributes:
        write: writes samples into a folder, given VALUES and LABELS; returns the arguments of
            `data.load`.
        options: needed to load them.
        format: the name in `data.FORMATS`.
        known: the options that the reader has.
        held: where samples are between two reads. "memory": no change of the file is seen.
            "open": the file stays open or mapped. "closed": the file is opened for every read.
        scale: a value of VALUES is read as value / scale.
        exact: True if every byte counts: a file that is cut at any place is refused.
        empty: the error for an empty file, after its path.
        broken: further contents with this error.
        columns: writes named columns into a file; None: the format has no columns.
        both: the format's own reader of a training and a test part.
        package: the optional package that the format needs, and its extra.
    """

    write: Callable[[Path, Sequence[int], Sequence[int]], Paths]
    format: str
    held: str
    empty: str
    options: Mapping[str, Any] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    scale: int = 1
    exact: bool = True
    broken: tuple[bytes, ...] = ()
    columns: Callable[[Path, Mapping[str, Any]], Path] | None = None
    both: Callable[..., Any] | None = None
    package: tuple[str, str] | None = None

    def load(self, paths: Paths, **options: Any) -> data.Dataset:
        return data.load(*paths, **self.options, **options)


def matrix(values: Sequence[int], dtype: str = "u1") -> np.ndarray:
    return np.repeat(np.asarray(values, dtype)[:, None], 4, 1)


def write_arrays(folder: Path, values: Sequence[int], labels: Sequence[int]) -> Paths:
    np.save(folder / "x.npy", matrix(values))
    np.save(folder / "y.npy", labels)
    return folder / "x.npy", folder / "y.npy"


def archive(save: Callable[..., None]) -> Callable[..., Paths]:
    def write(folder: Path, values: Sequence[int], labels: Sequence[int]) -> Paths:
        save(folder / "d.NPZ.npz", x=matrix(values), y=labels, other=np.zeros(3))
        return (folder / "d.NPZ.npz",)

    return write


def idx_head(code: int, *shape: int) -> bytes:
    return struct.pack(f">4B{len(shape)}I", 0, 0, code, len(shape), *shape)


def write_idx(path: Path, array: np.ndarray) -> Path:
    code = IDX_CODES[array.dtype.newbyteorder("=").str[1:]]
    content = idx_head(code, *array.shape) + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


def idx(suffix: str) -> Callable[..., Paths]:
    def write(folder: Path, values: Sequence[int], labels: Sequence[int]) -> Paths:
        x = write_idx(folder / f"x-idx2{suffix}", matrix(values))
        return x, write_idx(folder / f"y.idx{suffix}", np.asarray(labels, "u1"))

    return write


def write_columns(path: Path, columns: Any, group: int = 4, **options: Any) -> Path:
    """Write a table in groups of rows, in the format of the path's suffix."""
    import pyarrow
    from pyarrow import csv, feather, parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    if path.suffix.lower() == ".parquet":
        parquet.write_table(table, path, row_group_size=group, **options)
    elif path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        feather.write_feather(
            table, path, chunksize=group, **{"compression": "uncompressed", **options}
        )
    return path


def columns_named(name: str) -> Callable[..., Paths]:
    def write(folder: Path, values: Sequence[int], labels: Sequence[int]) -> Paths:
        numbers = np.asarray(values, np.uint8)
        table = {"a": numbers, "b": numbers.astype(np.float64), "y": np.asarray(labels)}
        return (write_columns(folder / name, table),)

    return write


def lines(name: str, line: str, head: str = "") -> Callable[..., Paths]:
    def write(folder: Path, values: Sequence[int], labels: Sequence[int]) -> Paths:
        body = "".join(line.format(x=x, y=y) for x, y in zip(values, labels, strict=True))
        content = (head + body).encode()
        compressed = name.endswith(".gz")
        (folder / name).write_bytes(gzip.compress(content, mtime=0) if compressed else content)
        return (folder / name,)

    return write


def cifar(name: str, labels_of_each: int) -> Callable[..., Paths]:
    def write(folder: Path, values: Sequence[int], labels: Sequence[int]) -> Paths:
        records = (
            bytes([y] * labels_of_each) + bytes([x]) * 3072
            for x, y in zip(values, labels, strict=True)
        )
        (folder / name).write_bytes(b"".join(records))
        return (folder / name,)

    return write


def images(suffix: str, size: int = 2) -> Callable[..., Paths]:
    def write(folder: Path, values: Sequence[int], labels: Sequence[int]) -> Paths:
        from PIL import Image

        for row, (x, y) in enumerate(zip(values, labels, strict=True)):
            (folder / f"{y}").mkdir(exist_ok=True)
            image = Image.fromarray(np.full((size, size), x, np.uint8))
            image.save(folder / f"{y}" / f"{row:02d}.{suffix}")
        return (folder,)

    return write


STREAMS = {"x": {"dense": 2}, "y": {"sparse": 3, "one_hot": True}}
CSV = lines("d.csv", "{x},{x},{y}\n", "a,b,y\n")
CSV_OPTIONS = ("x", "y", "names", "delimiter", "header")


def column_files(name: str, kind: str, empty: str, magic: bytes, both: Callable[..., Any]) -> Row:
    return Row(
        columns_named(name),
        kind,
        "closed",
        empty,
        {"most_bytes": 100},
        ("x", "y", "most_bytes"),
        broken=(magic, b"nothing at all, but longer than 8 bytes"),
        columns=lambda path, table: write_columns(path.with_suffix(f".{kind}"), table),
        both=both,
        package=("pyarrow", "arrow"),
    )


TABLE: dict[str, Row] = {
    "npy": Row(write_arrays, "npy", "open", "is not a well-formed .npy array"),
    "npz": Row(archive(np.savez), "npz", "open", "is not a well-formed .npz file"),
    "npz, compressed": Row(
        archive(np.savez_compressed), "npz", "memory", "is not a well-formed .npz file"
    ),
    "idx": Row(idx(""), "idx", "open", "is not an IDX file"),
    "idx, compressed": Row(idx(".gz"), "idx", "memory", "is not an IDX file"),
    "parquet": column_files(
        "d.Parquet", "parquet", "is not a well-formed Parquet file", b"PAR1", data.parquet_parts
    ),
    "arrow": column_files(
        "d.feather", "arrow", "is not an? .*Arrow file", b"ARROW1\0\0", data.arrow_parts
    ),
    "csv": Row(
        CSV,
        "csv",
        "memory",
        "must begin with the names of its columns: it is empty",
        known=CSV_OPTIONS,
        exact=False,
        columns=lambda path, table: write_columns(path.with_suffix(".csv"), table),
        both=data.csv_parts,
    ),
    "csv, compressed": Row(
        lines("d.csv.gz", "{x},{x},{y}\n", "a,b,y\n"),
        "csv",
        "memory",
        "must begin with the names",
        known=CSV_OPTIONS,
    ),
    "libsvm": Row(
        lines("d.svm", "{y} 1:{x} 2:{x}\n"), "libsvm", "open", "is empty",
        known=("features", "zero_based", "target", "classes", "comm"), exact=False,
    ),
    "cntk": Row(
        lines("d.ctf", "|x {x} {x} |y {y}:1\n"), "cntk", "open", "is empty",
        {"streams": STREAMS}, ("streams", "comm"), exact=False,
    ),
    "cifar10": Row(
        cifar("data_batch_1.bin", 1), "cifar10", "open",
        "must be records of 3,073 bytes, as in CIFAR-10: it has none", scale=255,
    ),
    "cifar100": Row(
        cifar("train.bin", 2), "cifar100", "open",
        "must be records of 3,074 bytes, as in CIFAR-100: it has none",
        {"label": "coarse", "format": "cifar100"},
        ("label",), scale=255,
    ),
    "images": Row(
        images("bmp"), "images", "closed", "is not a readable image",
        known=("size", "colour", "names"), scale=255, exact=False,
        both=data.image_folders,
        package=("PIL.Image", "images"),
    ),
}  # fmt: skip


def table_of_lists(name: str, **options: Any) -> Callable[..., Paths]:
    def write(folder: Path, values: Sequence[int], labels: Sequence[int]) -> Paths:
        lists = [[float(x), float(x)] for x in values]
        return (write_columns(folder / name, {"x": lists, "y": labels}, **options),)

    return write


#: Further files that are damaged: other compression, suffixes and types.
DAMAGED: dict[str, Row] = {
    **TABLE,
    **{
        f"images, {suffix}": replace(TABLE["images"], write=images(suffix, 20))
        for suffix in ("png", "jpg", "gif", "webp", "tif")
    },
    "parquet, without checksums": replace(
        TABLE["parquet"], write=table_of_lists("d.parquet", compression="none")
    ),
    "parquet, checksums": replace(
        TABLE["parquet"],
        write=table_of_lists("d.parquet", compression="none", write_page_checksum=True),
    ),
    "parquet, lists": replace(
        TABLE["parquet"], write=table_of_lists("d.parquet", compression="zstd")
    ),
    "arrow, lists, not compressed": replace(TABLE["arrow"], write=table_of_lists("d.arrow")),
    "arrow, lists": replace(TABLE["arrow"], write=table_of_lists("d.arrow", compression="zstd")),
}
