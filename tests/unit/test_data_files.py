"""Data from files and items: what is read, what is refused, and how the message names it."""

from __future__ import annotations

import io
import os
import pickle
import resource
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fake_learners import Comm, Learner, numbered

from parallel_sgd import data
from parallel_sgd.data import Arrays, Source
from parallel_sgd.errors import SharedError, UserError


def saved(folder, kind, x, y):
    if kind == "npy":
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        return folder / "x.npy", folder / "y.npy"
    writer = np.savez if kind == "npz" else np.savez_compressed
    writer(folder / "d.npz", x=x, y=y, other=np.zeros(3))
    return (folder / "d.npz",)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["npy", "npz", "compressed"])
@pytest.mark.parametrize("dtype", ["<f8", ">f4", "f2", "u1"])
def test_files_hold_what_was_saved(tmp_path, kind, order, dtype):
    x = np.asarray(np.random.default_rng(0).integers(0, 99, (30, 4, 3)), dtype, order=order)
    y = np.arange(30, dtype=np.int16)
    loaded = data.load(*saved(tmp_path, kind, x, y))
    assert isinstance(loaded.x, np.memmap) == isinstance(loaded.y, np.memmap)
    assert isinstance(loaded.x, np.memmap) == (kind != "compressed")
    read_x, read_y = loaded.arrays()
    assert read_x.dtype == np.float32 and (read_x == x).all() and (read_y == y).all()
    own, _ = loaded.read(np.array([3, 1]), dtype=None)
    assert own.dtype == np.dtype(dtype).newbyteorder("=") and (own == x[[3, 1]]).all()
    assert own.flags.writeable


def test_a_rank_reads_only_its_rows_of_a_large_file(tmp_path):
    rows, width = 4096, 1 << 18  # 4 GiB, of which the file system stores none
    with open(tmp_path / "x.npy", "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        np.lib.format.write_array_header_2_0(file, header)
        file.truncate(file.tell() + 4 * rows * width)
    np.save(tmp_path / "y.npy", np.zeros(rows, int))
    source = Source(data.load(tmp_path / "x.npy", tmp_path / "y.npy"), minibatch_size=16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    minibatches = source.minibatches(Learner(Comm(1, 4)))
    for _ in range(3):
        assert next(minibatches)[0].shape == (4, width)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    (tmp_path / "x.npy").unlink()


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a data file executed code')",)


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed"])
def test_a_file_of_python_objects_is_refused_and_not_executed(tmp_path, kind):
    x = np.array([Bomb(), Bomb()], dtype=object)
    with pytest.raises(UserError, match=r"x.* must hold plain numbers: .* Python objects"):
        data.load(*saved(tmp_path, kind, x, np.zeros(2, int)))
    (tmp_path / "p.npz").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "p.npy").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match=r"p.npz is not a well-formed .npz file"):
        data.load(tmp_path / "p.npz")
    with pytest.raises(UserError, match=r"p.npy is not a well-formed .npy array"):
        data.load(tmp_path / "p.npy", tmp_path / "p.npy")


def test_file_errors_name_the_file(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((3, 2)))
    np.save(tmp_path / "y.npy", np.arange(4))
    np.savez(tmp_path / "a.npz", x=np.ones(3), z=np.ones(3))
    np.savez(tmp_path / "text.npz", x=np.ones(3), y=np.array(["a", "b", "c"]))
    os.mkfifo(tmp_path / "pipe.npy")
    with open(tmp_path / "dimensions.npy", "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (0, 2**70)}
        np.lib.format.write_array_header_1_0(file, header)
    for names, message in [
        (["x.npy", "y.npy"], r"y.npy: x and y must have equal lengths: 3 and 4"),
        (["a.npz"], r"a.npz must hold arrays x and y: it holds \['x', 'z'\]"),
        (["x.npy", "pipe.npy"], r"pipe.npy must be a regular file: it is a pipe"),
        (["text.npz"], "text.npz: y must hold plain numbers: it has dtype <U1"),
        (["dimensions.npy", "y.npy"], "dimensions.npy is not a well-formed .npy array"),
    ]:
        with pytest.raises(UserError, match=message):
            data.load(*(tmp_path / name for name in names))
    for path in ("a\0b.npz", "", 5, None):
        with pytest.raises(UserError, match=r"cannot be read|must be the path of a file"):
            data.load(path)


@pytest.mark.parametrize("claimed", ["in the array", "in the archive too"])
def test_a_compressed_file_that_claims_too_much_is_refused(tmp_path, claimed):
    """2^40 rows in some hundred bytes: memory for them is never asked for."""
    head = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
    np.lib.format.write_array_header_1_0(head, header)
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", head.getvalue() + bytes(1 << 16))
        archive.writestr("y.npy", head.getvalue())
    message = "is truncated"
    if claimed == "in the archive too":
        content, message = path.read_bytes(), "declares 4294967294 bytes, more than its"
        size = struct.pack("<L", len(head.getvalue()) + (1 << 16))
        assert content.count(size) >= 2
        path.write_bytes(content.replace(size, struct.pack("<L", 2**32 - 2)))
    with pytest.raises(UserError, match=rf"bomb.npz: x .*{message}"):
        data.load(path)


def test_an_order_that_memory_does_not_hold_is_refused(memory_pages):
    memory_pages(8)
    with pytest.raises(UserError, match="the order of an epoch's samples needs 8,000 bytes, but"):
        read_all(*numbered(1000))


def test_bad_arguments_are_refused_by_name():
    x, y = numbered(4)
    for message, arguments, options in [
        ("^minibatch_size=0 must be a whole number, at least 1$", (x, y, 0), {}),
        ("epochs=0 must be a whole number, at least 1", (x, y), {"epochs": 0}),
        ("seed=-1 must be a whole number, at least 0", (x, y), {"seed": -1}),
        ("start=-1 must be a whole number, at least 0", (x, y), {"start": -1}),
        ("classes=0 must be a whole number, at least 1", (x, y), {"classes": 0}),
        ("dtype='int32' must be a float type, or None", (x, y), {"dtype": "int32"}),
        ("x and y must have equal lengths: 4 and 3", (x, y[:3]), {}),
        ("y must hold plain numbers: it has dtype <U1", (x, ["a", "b", "c", "d"]), {}),
        ("shuffle='no' must be True or False", (x, y), {"shuffle": "no"}),
        ("epochs=4611686018427387904 of 4 samples: must be less", (x, y), {"epochs": 2**62}),
        (r"minibatch_size=1180591620717411303424 .* and less than 2\*\*63", (x, y, 2**70), {}),
        (r"x must be an array, or an object .*: it is the class list$", (list,), {}),
        ("x must hold plain numbers: it has dtype object", (x.astype(object), y), {}),
        ("x must hold plain numbers: it has dtype complex128", (x * 1j, y), {}),
        ("y must hold plain numbers: it has dtype object", (x, y.astype(object)), {}),
        ("y is missing", (x,), {}),
        (
            "y must not be given with a data set, which has its own: it is an int",
            (Arrays(x, y), 64),
            {},
        ),
        ("y must have one row for each sample", (x, 64), {}),
        ("a source needs at least one sample", (x[:0], y[:0]), {}),
        ("x='d.npz' must be an array or a data set; `load` reads a file", ("d.npz",), {}),
        (r"x must be an array, or an object .*: it is an int", (3,), {}),
        ("x must be a NumPy array: it is a list", ([[1], [1, 2]], [0, 1]), {}),
    ]:
        with pytest.raises(UserError, match=message):
            Source(*arguments, **options)
    with pytest.raises(UserError, match=r"start=5 must be at most the 3 samples that the"):
        next(Source(x, y, start=5).minibatches(Learner(samples=3)))


def read_all(x, y, **options):
    return list(Source(x, y, 4, **options).minibatches(Learner()))


def test_a_bad_sample_is_named_by_its_index():
    for place, value, message in [
        ((7, 1), np.nan, r"x\[7\]\[1\] = nan is not finite"),
        ((9, 0), -np.inf, r"x\[9\]\[0\] = -inf is not finite"),
        ((8, 0), 1e300, r"x\[8\]\[0\] = 1e\+300 is too large for float32"),
    ]:
        x, y = numbered(10)
        x[place] = value
        with pytest.raises(UserError, match=message):
            read_all(x, y)
    assert read_all(x, y, dtype="float64")[0][0].dtype == np.float64
    huge = np.full((4, 2), 3e38, np.float32)  # finite, though their sum is not
    assert len(read_all(huge, y[:4])) == 1
    for label, options, message in [
        (-1, {"classes": 10}, r"y\[3\] = -1 is out of range: must be from 0 to 9"),
        (0.5, {"classes": 10}, "y must hold integer labels: it has dtype float64"),
        (np.nan, {}, r"y\[3\] = nan is not finite"),
        (1e39, {}, r"y\[3\] = 1e\+39 is too large for float32"),
        (2**63, {}, r"y\[3\] = 9223372036854775808 is too large for int64"),
        (10, {"classes": 10}, r"y\[3\] = 10 is out of range: must be from 0 to 9"),
    ]:
        x, y = numbered(10)
        y = y.astype(np.result_type(np.min_scalar_type(label)) if label == 2**63 else type(label))
        y[3] = label
        with pytest.raises(UserError, match=message):
            read_all(x, y, **options)


def test_a_bad_item_is_named_by_its_index():
    for items, message in [
        ([(np.ones(2), 0), 5], "item 1 must be a pair .*: it is an int"),
        ([(np.ones(2), 0), (np.ones(3), 0)], r"x\[\d\] has shape \[\d\]: must be \[\d\]"),
        (
            [(np.ones(2), 0), (np.ones(2), 0.5)],
            r"y\[\d\] holds (floats|whole numbers), and y\[\d\] .*: must be of one kind",
        ),
        ([(np.ones(2), "a")], r"y\[0\] must hold plain numbers: it has dtype <U1"),
        ([(np.ones(2), None)], r"y\[0\] must hold plain numbers: it has dtype object"),
        ([(object(), 0)], r"x\[0\] must hold plain numbers: it has dtype object"),
        ([([[1], [1, 2]], 0)], r"x\[0\] must be a NumPy array: it is a list"),
    ]:
        with pytest.raises(SharedError, match=f"^all know: {message}"):
            read_all(items, None)


class Unreadable(list):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise self.error


def test_an_item_that_cannot_be_read_is_named_by_its_index():
    lost = OSError("lost the disk\nfor good")
    with pytest.raises(SharedError, match=r"^all know: item 0 cannot be read: lost the disk for"):
        read_all(Unreadable(lost), None)
    with pytest.raises(SharedError, match=r"^all know: item 0 is a secret$"):
        read_all(Unreadable(UserError("item 0 is a secret")), None)
    with pytest.raises(SharedError, match=r"^they all know already$"):
        read_all(Unreadable(SharedError("they all know already")), None)
    place = rf"{Path(__file__).name}:\d+"
    with pytest.raises(SharedError, match=rf"item 0 cannot be read: KeyError: 'x' \({place}\)$"):
        read_all(Unreadable(KeyError("x")), None)
    with pytest.raises(SharedError, match=rf"item 0 cannot be read: MemoryError \({place}\)$"):
        read_all(Unreadable(MemoryError()), None)


def test_items_whose_number_cannot_be_told():
    class Endless(Unreadable):
        def __len__(self):
            raise NotImplementedError("how\nmany?")

    with pytest.raises(UserError, match=r"^the number of items is not known: NotImpl"):
        Source(Endless(None))


@pytest.mark.parametrize("as_items", [False, True])
def test_what_is_learned_may_be_any_numbers(as_items):
    """Values of a regression, ±1, ratings: only labels of classes must be from 0."""
    x, signs = numbered(9)[0], np.where(np.arange(9) % 2, 1, -1)

    def targets(y, **options):
        given = (list(zip(x, y, strict=True)), None) if as_items else (x, y)
        return np.concatenate([y for _, y in read_all(*given, shuffle=False, **options)])

    labels = targets(signs.astype(np.int8))
    assert labels.dtype == np.int64 and (labels == signs).all()
    heights = np.linspace(-1, 1, 9)
    for dtype, expected in ((np.float32, "f4"), (np.float64, "f8"), (None, "f8")):
        values = targets(heights, dtype=dtype)
        assert values.dtype == expected and (values == heights.astype(expected)).all()
    assert (targets(np.stack([heights, heights], 1)) == heights.astype("f4")[:, None]).all()
    assert (targets(heights > 0) == (heights > 0)).all()


def test_only_the_samples_read_are_checked():
    x, y = numbered(8)
    x[7] = np.nan
    minibatches = Source(x, y, 7, shuffle=False).minibatches(Learner())
    assert len(next(minibatches)[0]) == 7
    with pytest.raises(UserError):
        next(minibatches)
