"""Files that change while they are read: every reader tells, or goes on with what it has opened."""

from __future__ import annotations

import os
import pickle
import time

import numpy as np
import pyarrow
import pytest
from fake_learners import Learner
from PIL import Image
from pyarrow import feather, parquet
from test_idx import written

from parallel_sgd import UserError, data
from parallel_sgd.errors import SharedError

ROWS = 24


def values(fill):
    """Features that tell in which file they are, as images hold them, too."""
    return np.full((ROWS, 4), fill, np.uint8)


Y = np.arange(ROWS) % 2


def npy(folder, fill):
    np.save(folder / "x.npy", values(fill))
    np.save(folder / "y.npy", Y)


def columns(folder, fill, name):
    table = pyarrow.table({"x": values(fill)[:, 0], "y": Y})
    if name.endswith("parquet"):
        parquet.write_table(table, folder / name, row_group_size=4)
    else:
        feather.write_feather(table, folder / name, chunksize=4, compression="uncompressed")


def text(folder, fill, name, line):
    (folder / name).write_text("".join(line.format(x=fill, y=y) for y in Y))


def images(folder, fill):
    for row, label in enumerate(Y):
        (folder / f"{label}").mkdir(exist_ok=True)
        image = Image.fromarray(np.full((2, 2), fill, np.uint8))
        image.save(folder / f"{label}" / f"{row:02d}.bmp")


def idx(folder, fill):
    written(folder / "x.idx", values(fill))
    written(folder / "y.idx", Y.astype("u1"))


STREAMS = {"x": {"dense": 1}, "y": {"sparse": 2, "one_hot": True}}
CNTK = "|x {x} |y {y}:1\n"

#: By name: who writes the files into a folder, and who opens them.
READERS = {
    "npy": (npy, lambda folder: data.load(folder / "x.npy", folder / "y.npy")),
    "npz": (
        lambda folder, fill: np.savez(folder / "d.npz", x=values(fill), y=Y),
        lambda folder: data.load(folder / "d.npz"),
    ),
    "mapped": (
        npy,
        lambda folder: data.Arrays(*(np.load(folder / f"{n}.npy", mmap_mode="r") for n in "xy")),
    ),
    "idx": (idx, lambda folder: data.load(folder / "x.idx", folder / "y.idx")),
    "parquet": (
        lambda folder, fill: columns(folder, fill, "d.parquet"),
        lambda folder: data.load(folder / "d.parquet", most_bytes=100),
    ),
    "arrow": (
        lambda folder, fill: columns(folder, fill, "d.arrow"),
        lambda folder: data.load(folder / "d.arrow", most_bytes=100),
    ),
    "libsvm": (
        lambda folder, fill: text(folder, fill, "d.svm", "{y} 1:{x}\n"),
        lambda folder: data.load(folder / "d.svm"),
    ),
    "cntk": (
        lambda folder, fill: text(folder, fill, "d.ctf", CNTK),
        lambda folder: data.load(folder / "d.ctf", streams=STREAMS),
    ),
    "cifar": (
        lambda folder, fill: (folder / "data_batch_1.bin").write_bytes(
            b"".join(bytes([y]) + bytes([fill]) * 3072 for y in Y)
        ),
        lambda folder: data.load(folder / "data_batch_1.bin"),
    ),
    "images": (images, data.load),
}


def replace(folder, write, fill):
    """Other files take the names of those that are there."""
    aside = folder.with_name("aside")
    aside.mkdir()
    write(aside, fill)
    for path in sorted(p for p in aside.rglob("*") if p.is_file()):
        os.replace(path, folder / path.relative_to(aside))


def overwrite(folder, write, fill):
    """The same files get another content."""
    replacement = folder.with_name("replacement")
    replacement.mkdir()
    write(replacement, fill)
    for path in sorted(p for p in replacement.rglob("*") if p.is_file()):
        (folder / path.relative_to(replacement)).write_bytes(path.read_bytes())


@pytest.mark.parametrize("change", [replace, overwrite])
@pytest.mark.parametrize("name", READERS)
def test_no_sample_of_another_file_is_trained_on_in_silence(name, change, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write, opened = READERS[name]
    write(folder, 1)
    dataset = opened(folder)
    minibatches = data.Source(dataset, None, 4, shuffle=False).minibatches(Learner())
    first, _ = next(minibatches)
    time.sleep(0.02)  # longer than the clock of the file system ticks
    change(folder, write, 2)
    seen, error = [first], None
    try:
        seen += [x for x, _ in minibatches]
    except SharedError as refused:
        error = str(refused)
    assert all((x == first[0]).all() for x in seen)
    if change is overwrite or name in ("parquet", "arrow", "images"):
        assert error and "has changed since it was opened: " in error
        assert name == "mapped" or str(folder) in error
    else:  # the pages of the first file stay
        assert error is None and len(seen) == ROWS // 4


def test_another_process_does_not_open_another_file(tmp_path):
    for name in ("libsvm", "cntk", "images"):
        folder = tmp_path / name / "data"
        folder.mkdir(parents=True)
        write, opened = READERS[name]
        write(folder, 1)
        kept = pickle.dumps(opened(folder))
        pickle.loads(kept).read(np.arange(4))
        replace(folder, write, 2)
        with pytest.raises(
            UserError, match=r"has changed since it was .*: another file has its na"
        ):
            pickle.loads(kept).read(np.arange(4))


def test_an_array_that_its_owner_writes_to_is_no_change(tmp_path):
    np.save(tmp_path / "x.npy", values(1).astype(np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="r+")
    dataset = data.Arrays(x, Y)
    time.sleep(0.02)
    x[:] = 3
    x.flush()
    assert (dataset.read(np.arange(4))[0] == 3).all()


def test_files_that_are_removed_stay_mapped(tmp_path):
    npy(tmp_path, 1)
    dataset = data.load(tmp_path / "x.npy", tmp_path / "y.npy")
    (tmp_path / "x.npy").unlink()
    assert (dataset.arrays()[0] == 1).all()
