"""IDX files: what is read back, and what is refused before memory is taken for it."""

from __future__ import annotations

import gzip
import resource
from contextlib import nullcontext

import numpy as np
import pytest
from reader_table import IDX_CODES, idx_head, write_idx

from parallel_sgd import data
from parallel_sgd.data.examples import bundled
from parallel_sgd.errors import UserError


@pytest.mark.parametrize("name", ["x-idx3-ubyte", "x.idx.gz"])
@pytest.mark.parametrize("shape", [(5,), (3, 2, 4), (0, 28, 28), (1,) * 20])
@pytest.mark.parametrize("dtype", IDX_CODES)
def test_what_was_written_is_read(tmp_path, dtype, shape, name):
    numbers = np.random.default_rng(0).normal(0, 50, shape)
    array = numbers.astype("i2").astype(dtype) if dtype[0] != "f" else numbers.astype(dtype)
    path = write_idx(tmp_path / name, array)
    read = data.load_idx(path)
    assert read.dtype == np.dtype(dtype) and read.dtype.isnative and read.flags.writeable
    assert read.shape == shape and (read == array).all()
    pair = data.load(path, path)
    mapped = name == "x-idx3-ubyte" and array.size > 0
    assert isinstance(pair.x, np.memmap) == isinstance(pair.y, np.memmap) == mapped
    x, y = pair.read(np.arange(len(array)), dtype=None)
    images = dtype == "u1" and len(shape) > 2
    assert (x == (array / np.float32(255) if images else array)).all()
    assert x.dtype == ("f4" if images else dtype) and x.dtype.isnative
    assert y.dtype == (dtype if dtype[0] == "f" else np.int64) and (y == array).all()


def test_files_of_several_chunks(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (3 << 20) + 5, np.uint8)
    for name in ("x", "x.gz"):
        assert (data.load_idx(write_idx(tmp_path / name, array)) == array).all()


def mapped_idx(path):
    return data.load_idx_pair(path, path).x


GOOD = idx_head(8, 2, 3) + b"abcdef"
HUGE = 2**32 - 1

REFUSED = [
    (b"", r"is not an IDX file: .* it begins with \[\]"),
    (GOOD[:3], r"is not an IDX file: .* it begins with \[0, 0, 8\]"),
    (
        b"\x80\x04\x95\x10",
        r"is not an IDX file: it must begin with the bytes 0, 0, a type \(of 8, 9",
    ),
    (idx_head(10, 2) + b"ab", r"is not an IDX file: .* it begins with \[0, 0, 10, 1\]"),
    (idx_head(8) + b"a", r"is not an IDX file: .* it begins with \[0, 0, 8, 0\]"),
    (GOOD[:9], "is truncated: 5 bytes of sizes, its 2 dimensions require 8"),
    (GOOD[:-1], "is truncated: 5 bytes of data, its shape requires 6"),
    (idx_head(14, 2, 3) + b"abcdef", "is truncated: 6 bytes of data, its shape requires 48"),
    (GOOD + b"g", r"is longer than its sizes \[2, 3\] require: 6 bytes of data"),
    (idx_head(8, 0, 3) + b"g", r"is longer than its sizes \[0, 3\] require: 0 bytes of data"),
    (idx_head(8, *(1,) * 255) + b"a", "is not a well-formed IDX file: maximum supported dimension"),
]


@pytest.mark.parametrize("name", ["x-idx", "x.gz"])
@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_a_malformed_file_is_one_line_that_names_it(tmp_path, content, message, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name == "x.gz" else content)
    for reader in (data.load_idx, mapped_idx):
        with pytest.raises(UserError, match=f"^{path} {message}") as caught:
            reader(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", [(HUGE,), (HUGE, 4), (HUGE,) * 3, (HUGE,) * 255])
def test_absurd_sizes_are_refused_before_memory_is_taken(tmp_path, sizes):
    content = idx_head(14, *sizes) + bytes(1 << 16)
    (tmp_path / "x").write_bytes(content)
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for reader in (data.load_idx, mapped_idx):
        with pytest.raises(UserError, match="x is truncated: 65536 bytes of data, its shape requi"):
            reader(tmp_path / "x")
    with pytest.raises(
        UserError, match=r"x.gz is not well-formed: it declares \d+ bytes, more than its"
    ):
        data.load_idx(tmp_path / "x.gz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_a_damaged_gz_is_refused_in_one_line(tmp_path):
    path = tmp_path / "x.gz"
    whole = gzip.compress(idx_head(8, 999) + np.random.default_rng(0).bytes(999))
    flipped = whole[:500] + bytes([whole[500] ^ 255]) + whole[501:]
    for content, message in [
        (GOOD, "Not a gzipped file"),
        (whole[:-9], "Compressed file ended before the end-of-stream marker was reached"),
        (whole[:5], "Compressed file ended before the end-of-stream marker was reached"),
        (flipped, ""),
        (whole + b"more", "Not a gzipped file"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"x.gz is not a well-formed gzip file: {message}"):
            data.load_idx(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"x.gz is not an IDX file"):
        data.load_idx(path)


@pytest.fixture(params=["", ".gz"])
def folder(tmp_path, request):
    """Fashion-MNIST of 20 and 10 images, the i-th of them filled with i."""
    for part, n in (("train", 20), ("t10k", 10)):
        numbers = np.arange(n, dtype="u1")
        images = np.broadcast_to(numbers[:, None, None], (n, 28, 28))
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{request.param}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{request.param}", numbers % 10)
    return tmp_path


def test_fashion_mnist_is_images_from_0_to_1(folder):
    train, test = data.fashion_mnist(folder)
    assert (len(train), len(test)) == (20, 10)
    x, y = train.read(np.array([11, 3]), classes=data.FASHION_MNIST_CLASSES)
    assert x.shape == (2, 1, 28, 28) and x.dtype == np.float32
    assert y.dtype == np.int64 and y.tolist() == [1, 3]
    assert (x == np.array([11, 3], np.float32)[:, None, None, None] / np.float32(255)).all()
    for dtype, expected in ((np.float64, "f8"), (np.float16, "f2"), (None, "f4")):
        read, _ = train.read(np.array([19]), dtype=dtype)
        assert read.dtype == expected and read[0, 0, 0, 0] == pytest.approx(19 / 255, rel=1e-3)
    assert (train.x[19] == 19).all()  # what was read was a copy


def test_what_is_not_fashion_mnist_is_refused(folder):
    image_file, label_file = sorted(folder.glob("train-*"))
    good = {file: file.read_bytes() for file in (image_file, label_file)}
    for file, array, message in [
        (
            image_file,
            np.zeros((20, 28, 27), "u1"),
            r"ubyte images \[n, 28, 28\]: it holds uint8 \[",
        ),
        (image_file, np.zeros((20, 28, 28), "f4"), r"ubyte images \[n, 28, 28\]: it holds float32"),
        (image_file, np.zeros((9, 28, 28), "u1"), "x and y must have equal lengths: 9 and 20"),
        (label_file, np.full(20, 10, "u1"), r"ubyte labels \[n\] from 0 to 9: .*, at most 10"),
        (label_file, np.zeros((20, 1), "u1"), r"ubyte labels \[n\] from 0 to 9: it holds uint8 \["),
        (label_file, np.zeros(20, "i4"), r"ubyte labels \[n\] from 0 to 9: it holds int32 \[20\]"),
    ]:
        write_idx(file, array)
        with pytest.raises(UserError, match=f"train-.*{message}"):
            data.fashion_mnist(folder)
        file.write_bytes(good[file])
    label_file.unlink()
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte.gz: there is no such file"):
        data.fashion_mnist(folder)


def test_where_the_package_is_missing_it_is_named(folder, monkeypatch):
    refused = pytest.raises(UserError, match=r"/no: apt install dataset-fashion-mnist, or give")
    for there, expected in ((folder / "no", refused), (folder, nullcontext())):
        monkeypatch.setattr(bundled, "FASHION_MNIST_FOLDER", str(there))
        with expected:
            assert len(data.fashion_mnist()[0]) == 20
