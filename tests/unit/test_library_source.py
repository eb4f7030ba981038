"""The library's source as windows of bytes: split by file, and no window across a file's border."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from parallel_sgd.data import ByteWindows, library_source
from parallel_sgd.errors import UserError

FILES = {"a.py": b"import os\n", "b/empty.py": b"", "b/one.py": b"\xff", "c.py": bytes(range(40))}


def naive(files, context):
    """Every byte with the bytes before it, one at a time."""
    x, y = [], []
    for content in files.values():
        for i, byte in enumerate(content):
            before = content[max(0, i - context) : i]
            x.append([0] * (context - len(before)) + list(before))
            y.append(byte)
    return np.array(x), np.array(y)


@pytest.mark.parametrize("context", [1, 3, 8, 50])
@pytest.mark.parametrize("names", ["a.py b/empty.py b/one.py c.py", "b/empty.py c.py b/empty.py"])
def test_windows_are_those_of_a_naive_loop(names, context):
    files = {name: FILES[name] for name in names.split()}
    windows = ByteWindows(files, context)
    x, y = naive(files, context)
    assert len(windows) == len(y) == sum(map(len, files.values()))
    found_x, found_y = windows.arrays()
    assert found_x.dtype == np.float32 and found_y.dtype == np.int64
    assert found_x.tolist() == x.tolist() and found_y.tolist() == y.tolist()
    some = np.random.default_rng(0).permutation(np.repeat(np.arange(len(y)), 2))
    found_x, found_y = windows.read(some, dtype=None)
    assert found_x.dtype == np.uint8
    assert found_x.tolist() == x[some].tolist() and found_y.tolist() == y[some].tolist()


@pytest.mark.parametrize("files", [{}, {"empty.py": b""}])
def test_files_without_samples(files):
    windows = ByteWindows(files, 4)
    x, y = windows.read(np.arange(0))
    assert x.shape == (0, 4) and y.shape == (0,) and len(windows) == 0
    with pytest.raises(UserError, match="context=0 must be a whole number, at least 1"):
        ByteWindows(files, 0)


def test_the_library_is_split_by_file():
    train, test = library_source(most_bytes=400_000)
    assert not set(train.files) & set(test.files)
    for part in (train, test):
        x, y = part.arrays(dtype=None)
        folder = Path(sysconfig.get_path("stdlib"))
        assert y.astype(np.uint8).tobytes() == b"".join(
            (folder / f).read_bytes() for f in part.files
        )
        assert x.shape == (len(part), 8)
    assert 350_000 < len(train) + len(test) <= 400_000
    assert 0.08 < len(test) / (len(train) + len(test)) <= 0.1


def test_the_split_comes_from_the_seed():
    def files(**options):
        return [part.files for part in library_source(most_bytes=300_000, **options)]

    assert files() == files() == files(seed=0, context=3)
    assert files() != files(seed=1)
    assert [part.context for part in library_source(3, most_bytes=10_000)] == [3, 3]


@pytest.fixture
def library_at(monkeypatch):
    """Sets the folder of Python's library."""
    return lambda path: monkeypatch.setattr(
        sysconfig, "get_path", {"stdlib": str(path)}.__getitem__
    )


@pytest.fixture
def library(tmp_path, library_at):
    """A library of 21 files of 10 bytes, with all that is left out."""
    library_at(tmp_path)
    wanted = [f"{folder}m{i}.py" for folder in ("", "package/", "a/b/test_me/") for i in range(7)]
    unwanted = [
        "test/m.py",
        "package/tests/m.py",
        "idlelib/idle_test/m.py",
        "site-packages/m.py",
        "dist-packages/m.py",
        "package/__pycache__/m.py",
        "config-3.11-x86_64-linux-gnu/m.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "package/m.txt",
        "package/m.pyc",
    ]
    for name in wanted + unwanted:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"0123456789" if name in wanted else b"unwanted")
    return tmp_path, wanted


def test_tests_and_what_was_built_are_left_out(library):
    _, wanted = library
    train, test = library_source(2)
    assert sorted(train.files + test.files) == sorted(wanted)
    assert len(test.files) == 2 and len(train) == 190


def test_files_that_still_fit_are_taken(library):
    folder, wanted = library
    (folder / "large.py").write_bytes(bytes(1000))
    train, test = library_source(2, 0.5, most_bytes=105)
    assert len(train) == len(test) == 50
    assert set(train.files + test.files) < set(wanted)
    for seed in range(5):  # wherever the large file stands in the order
        train, test = library_source(2, 0.1, seed)
        assert "large.py" in train.files and len(test) == 120


def test_the_order_does_not_come_from_the_file_system(library, request):
    before = [part.files for part in library_source(2, 0.3)]
    request.getfixturevalue("folders_backwards")
    assert [part.files for part in library_source(2, 0.3)] == before


def test_a_library_without_source_is_one_line(tmp_path, library_at):
    for path, message in [
        (tmp_path, f"{tmp_path}: Python's library has no source files"),
        (tmp_path / "no", f"{tmp_path}/no: Python's library cannot be read: No such file"),
    ]:
        library_at(path)
        with pytest.raises(UserError, match="^" + message) as caught:
            library_source()
        assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(library):
    folder, _ = library
    (folder / "gone.py").symlink_to(folder / "nowhere")
    with pytest.raises(UserError, match=r"gone.py: Python's library cannot be read: No such file"):
        library_source()


def test_bad_arguments_are_refused(library):
    for message, options in [
        ("context=0 must be a whole number, at least 1", {"context": 0}),
        ("test=1.0 must be a finite number, at least 0 and less than 1", {"test": 1.0}),
        ("test=-1 must be a finite number, at least 0 and less than 1", {"test": -1}),
        ("seed=-1 must be a whole number, at least 0", {"seed": -1}),
        ("most_bytes=0 must be a whole number, at least 1", {"most_bytes": 0}),
        (r"test=0, most_bytes=None must leave at least one of 21 files", {"test": 0}),
        (r"test=0.1, most_bytes=9 must leave at least one of 21 files", {"most_bytes": 9}),
    ]:
        with pytest.raises(UserError, match="^" + message):
            library_source(**options)
